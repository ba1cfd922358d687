#!/usr/bin/env python3
"""An independent reference in plain numpy: reads the exported files and compares with the golden values.
check_numpy.py MODEL_DIR GOLDEN_DIR [--max N]

Reads prompts.json, layers.json and mtp.json of GOLDEN_DIR; prompts longer than N tokens (default 200) are left out.
From the top of the repository: python3 tools/demo-model/check_numpy.py models/demo tests/golden"""
import json, math, os, struct, sys

import numpy as np

if len(sys.argv) < 3:
    sys.exit(__doc__)
MD, FX = sys.argv[1:3]
MAX = int(sys.argv[sys.argv.index("--max") + 1]) if "--max" in sys.argv else 200
C = json.load(open(os.path.join(MD, "config.json")))

e4m3 = np.zeros(256, np.float32)
for b in range(256):
    e, m = b >> 3 & 15, b & 7
    v = m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    e4m3[b] = math.nan if b & 127 == 127 else -v if b & 128 else v

raw = {}
for fn in sorted(set(json.load(open(os.path.join(MD, "model.safetensors.index.json")))["weight_map"].values())):
    d = open(os.path.join(MD, fn), "rb").read()
    n = struct.unpack("<Q", d[:8])[0]
    for k, t in json.loads(d[8:8 + n]).items():
        if k == "__metadata__":
            continue
        x = d[8 + n + t["data_offsets"][0]:8 + n + t["data_offsets"][1]]
        if t["dtype"] == "F8_E4M3":
            x = e4m3[np.frombuffer(x, np.uint8)]
        elif t["dtype"] == "BF16":
            x = (np.frombuffer(x, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            assert t["dtype"] == "F32"
            x = np.frombuffer(x, np.float32)
        raw[k] = x.reshape(t["shape"])


def W(name):
    w = raw[name]
    s = raw.get(name + "_scale_inv")
    if s is None:
        return w
    k = ("deq", name)
    if k not in raw:                     # block (i, j) covers rows 128 i .. and columns 128 j ..; the last may be partial
        raw[k] = w * np.repeat(np.repeat(s, 128, 0), 128, 1)[:w.shape[0], :w.shape[1]]
    return raw[k]


def rms(x, w):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(C["rms_norm_eps"])) * w


def silu(x):
    return x / (1 + np.exp(-x))


y = C["rope_scaling"]
dr = C["qk_rope_head_dim"]
base = C["rope_theta"] ** (np.arange(0, dr, 2) / dr)
corr = lambda r: dr * math.log(y["original_max_position_embeddings"] / (r * 2 * math.pi)) / (2 * math.log(C["rope_theta"]))
lo, hi = max(math.floor(corr(y["beta_fast"])), 0), min(math.ceil(corr(y["beta_slow"])), dr - 1)
ramp = np.clip((np.arange(dr // 2) - lo) / (hi - lo), 0, 1)
inv = ramp / (y["factor"] * base) + (1 - ramp) / base
mscale = 0.1 * y["mscale_all_dim"] * math.log(y["factor"]) + 1
H, dn, dv = C["num_attention_heads"], C["qk_nope_head_dim"], C["v_head_dim"]
scale = mscale * mscale / math.sqrt(dn + dr)


def rope(x, T):
    f = np.arange(T)[:, None] * inv
    c, s = np.cos(f).astype(np.float32), np.sin(f).astype(np.float32)
    if x.ndim == 3:
        c, s = c[:, None], s[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return np.concatenate((a * c - b * s, b * c + a * s), -1)


def mlp(x, p):
    return (silu(x @ W(p + "gate_proj.weight").T) * (x @ W(p + "up_proj.weight").T)) @ W(p + "down_proj.weight").T


def layer(x, i, trace=None):
    p, T = f"model.layers.{i}.", len(x)
    a = p + "self_attn."
    h = rms(x, W(p + "input_layernorm.weight"))
    q = rms(h @ W(a + "q_a_proj.weight").T, W(a + "q_a_layernorm.weight")) @ W(a + "q_b_proj.weight").T
    q = q.reshape(T, H, dn + dr)
    q = np.concatenate((q[..., :dn], rope(q[..., dn:], T)), -1)
    kv = h @ W(a + "kv_a_proj_with_mqa.weight").T
    r = C["kv_lora_rank"]
    pe = rope(kv[:, r:], T)
    kv = (rms(kv[:, :r], W(a + "kv_a_layernorm.weight")) @ W(a + "kv_b_proj.weight").T).reshape(T, H, dn + dv)
    k = np.concatenate((kv[..., :dn], np.repeat(pe[:, None], H, 1)), -1)
    s = np.einsum("qhd,khd->hqk", q, k) * np.float32(scale) + np.triu(np.full((T, T), -1e30, np.float32), 1)
    s = np.exp(s - s.max(-1, keepdims=True))
    s /= s.sum(-1, keepdims=True)
    x = x + np.einsum("hqk,khd->qhd", s, kv[..., dn:]).reshape(T, -1) @ W(a + "o_proj.weight").T
    h = rms(x, W(p + "post_attention_layernorm.weight"))
    if i < C["first_k_dense_replace"]:
        return x + mlp(h, p + "mlp.")
    g = 1 / (1 + np.exp(-(h @ W(p + "mlp.gate.weight").T)))
    ch = g + W(p + "mlp.gate.e_score_correction_bias")
    E, G = C["n_routed_experts"], C["n_group"]
    out = mlp(h, p + "mlp.shared_experts.")
    sel = []
    for t in range(T):
        grp = ch[t].reshape(G, -1)
        best = np.argsort(-np.sort(grp, -1)[:, -2:].sum(-1), kind="stable")[:C["topk_group"]]
        m = np.full((G, E // G), -np.inf)
        m[best] = grp[best]
        ix = np.sort(np.argsort(-m.ravel(), kind="stable")[:C["num_experts_per_tok"]])
        w = g[t, ix] / (g[t, ix].sum() + 1e-20) * C["routed_scaling_factor"]
        sel.append((ix.tolist(), w))
        for e, we in zip(ix, w):
            out[t] += we * mlp(h[t:t + 1], f"{p}mlp.experts.{e}.")[0]
    if trace is not None:
        trace[i] = sel
    return x + out


L = C["num_hidden_layers"]


def run(ids):
    x = W("model.embed_tokens.weight")[ids]
    hs, tr = [], {}
    for i in range(L):
        x = layer(x, i, tr)
        hs.append(x)
    h = rms(x, W("model.norm.weight"))
    return h, h @ W("lm_head.weight").T, hs, tr


def draft(ids, h):
    p = f"model.layers.{L}."
    e = W(p + "embed_tokens.weight")[ids[1:]]
    x = np.concatenate((rms(e, W(p + "enorm.weight")), rms(h[:-1], W(p + "hnorm.weight"))), -1) @ W(p + "eh_proj.weight").T
    return rms(layer(x, L), W(p + "shared_head.norm.weight")) @ W(p + "shared_head.head.weight").T


bad = 0


def report(what, diff, tol, ok=True):
    global bad
    f = diff < tol and ok
    bad += not f
    print("ok  " if f else "BAD ", what, f"largest difference {diff:.1e}", flush=True)


for p in json.load(open(os.path.join(FX, "prompts.json")))["prompts"]:
    if p["n"] > MAX:
        continue
    ids = p["ids"] + p["greedy"]
    _, lg, _, _ = run(ids)
    d = max(float(np.abs(lg[q["pos"], q["ids"]] - np.array(q["logits"])).max()) for q in p["logits"])
    same = lg[p["n"] - 1:-1].argmax(-1).tolist() == p["greedy"]
    report(f"{p['name']}: logits, greedy ids {'equal' if same else 'DIFFER'}", d, 5e-3, same)
for p in json.load(open(os.path.join(FX, "layers.json")))["prompts"]:
    h, _, hs, tr = run(p["ids"])
    d = max(float(np.abs(hs[l["layer"]][-1] - np.array(l["hidden_last"])).max()) for l in p["layers"])
    ex = all([s for s, _ in tr[l["layer"]]] == l["experts"] for l in p["layers"] if "experts" in l)
    dw = max(float(np.abs(tr[l["layer"]][-1][1] - np.array(l["weights_last"])).max()) for l in p["layers"] if "experts" in l)
    report(f"layers of {p['name']}: experts {'equal' if ex else 'DIFFER'}, weights within {dw:.1e}", d, 5e-3, ex and dw < 1e-4)
    report(f"final norm of {p['name']}", float(np.abs(h[-1] - np.array(p["final_norm_last"])).max()), 5e-3)
for p in json.load(open(os.path.join(FX, "mtp.json")))["prompts"]:
    if len(p["ids"]) > MAX:
        continue
    h, _, _, _ = run(p["ids"])
    dg = draft(p["ids"], h)
    report(f"MTP drafts of {p['name']}", max(float(np.abs(dg[q["pos"], q["ids"]] - np.array(q["logits"])).max()) for q in p["drafts"]), 5e-3)
print("all agree" if not bad else f"{bad} differ")
sys.exit(bad > 0)
