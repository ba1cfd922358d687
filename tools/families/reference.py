#!/usr/bin/env python3
"""An independent reference of the families in plain numpy, in float64 over dequantised weights.
reference.py CHECKPOINTS             compares each CHECKPOINTS/NAME with its values.json
reference.py CHECKPOINTS NAME OUT    writes OUT, the values of one: those of FP8 checkpoints come from here

A block of weight_scale_inv covers weight_block_size rows and columns from the tensor's first element; the last may be partial."""
import json, math, os, struct, sys

import numpy as np

LENGTHS, N_GREEDY = (3, 41, 90), 20


def e4m3_table():
    table = np.zeros(256)
    for code in range(256):
        e, m = code >> 3 & 15, code & 7
        value = m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        table[code] = math.nan if code & 127 == 127 else -value if code & 128 else value
    return table


def read_tensors(path):
    tensors = {}
    for name in sorted(os.listdir(path)):
        if not name.endswith(".safetensors"):
            continue
        with open(os.path.join(path, name), "rb") as f:
            data = f.read()
        n = struct.unpack("<Q", data[:8])[0]
        for key, t in json.loads(data[8 : 8 + n]).items():
            if key == "__metadata__":
                continue
            raw = data[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]]
            if t["dtype"] == "F8_E4M3":
                values = e4m3_table()[np.frombuffer(raw, np.uint8)]
            elif t["dtype"] == "BF16":
                values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(raw, np.float32)
            tensors[key] = values.astype(np.float64).reshape(t["shape"])
    return tensors


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Model:
    def __init__(self, path):
        with open(os.path.join(path, "config.json")) as f:
            self.c = json.load(f)
        self.t = read_tensors(path)
        self.mixtral = self.c["model_type"] == "mixtral"

    def weight(self, name):
        w, scale = self.t[name], self.t.get(name + "_scale_inv")
        if scale is None:
            return w
        rows, cols = self.c["quantization_config"]["weight_block_size"]
        return w * np.repeat(np.repeat(scale, rows, 0), cols, 1)[: w.shape[0], : w.shape[1]]

    def linear(self, x, name):
        return x @ self.weight(name + ".weight").T

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * self.t[name + ".weight"]

    def angles(self, n, dims):
        c, y = self.c, self.c.get("rope_scaling")
        i = np.arange(dims // 2)
        freq = float(c["rope_theta"]) ** (-2 * i / dims)
        if y:
            pair = lambda turns: dims * math.log(y["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (
                2 * math.log(c["rope_theta"]))
            low, high = max(math.floor(pair(y["beta_fast"])), 0), min(math.ceil(pair(y["beta_slow"])), dims - 1)
            ramp = np.clip((i - low) / (high - low if high != low else 0.001), 0, 1)
            freq = freq * (1 - ramp) + freq / y["factor"] * ramp
        return np.arange(n)[:, None, None] * freq  # [positions, 1, pairs]

    def rotate(self, x, halves):
        """x [positions, heads, dims]; pairs are the two halves, or neighbours."""
        n = x.shape[-1] // 2
        a, b = (x[..., :n], x[..., n:]) if halves else (x[..., 0::2], x[..., 1::2])
        t = self.angles(x.shape[0], x.shape[-1])
        return np.concatenate([a * np.cos(t) - b * np.sin(t), b * np.cos(t) + a * np.sin(t)], -1)

    def attend(self, q, k, v, scale):
        """q, k [positions, heads, dims], v [positions, heads, dims]; causal, within the window."""
        n, window = q.shape[0], self.c.get("sliding_window") or q.shape[0]
        p = np.arange(n)
        seen = (p[None, :] <= p[:, None]) & (p[None, :] > p[:, None] - window)
        score = np.where(seen, np.einsum("ihd,jhd->hij", q, k) * scale, -np.inf)
        return np.einsum("hij,jhd->ihd", softmax(score), v).reshape(n, -1)

    def gqa(self, x, at):
        c, n = self.c, x.shape[0]
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        q = self.rotate(self.linear(x, at + "q_proj").reshape(n, heads, -1), True)
        k = self.rotate(self.linear(x, at + "k_proj").reshape(n, kv, -1), True)
        v = self.linear(x, at + "v_proj").reshape(n, kv, -1)
        k, v = np.repeat(k, heads // kv, 1), np.repeat(v, heads // kv, 1)
        return self.linear(self.attend(q, k, v, q.shape[-1] ** -0.5), at + "o_proj")

    def mla(self, x, at):
        c, n, heads = self.c, x.shape[0], self.c["num_attention_heads"]
        nope, rank, y = c["qk_nope_head_dim"], c["kv_lora_rank"], c.get("rope_scaling")
        if c.get("q_lora_rank"):
            q = self.linear(self.norm(self.linear(x, at + "q_a_proj"), at + "q_a_layernorm"), at + "q_b_proj")
        else:
            q = self.linear(x, at + "q_proj")
        q = q.reshape(n, heads, -1)
        latent = self.linear(x, at + "kv_a_proj_with_mqa")
        kv = self.linear(self.norm(latent[:, :rank], at + "kv_a_layernorm"), at + "kv_b_proj").reshape(n, heads, -1)
        turned = np.repeat(self.rotate(latent[:, None, rank:], False), heads, 1)
        q = np.concatenate([q[..., :nope], self.rotate(q[..., nope:], False)], -1)
        k = np.concatenate([kv[..., :nope], turned], -1)
        scale = q.shape[-1] ** -0.5
        if y:
            scale *= (0.1 * y["mscale_all_dim"] * math.log(y["factor"]) + 1) ** 2
        return self.linear(self.attend(q, k, kv[..., nope:], scale), at + "o_proj")

    def route(self, x, at):
        """Chosen experts, ascending, and their weights."""
        c = self.c
        k = c["num_experts_per_tok"]
        logits = x @ self.t[at + "gate.weight"].T
        score = 1 / (1 + np.exp(-logits)) if c.get("scoring_func") == "sigmoid" else softmax(logits)
        choice = score + self.t.get(at + "gate.e_score_correction_bias", 0)
        method = c.get("topk_method", "greedy")
        if method != "greedy":
            groups = choice.reshape(len(x), c["n_group"], -1)
            value = np.sort(groups, -1)[..., -2:].sum(-1) if method == "noaux_tc" else groups.max(-1)
            worst = np.argsort(-value, -1, kind="stable")[:, c["topk_group"] :]
            for row, w in enumerate(worst):
                groups[row, w] = -np.inf
            choice = groups.reshape(len(x), -1)
        experts = np.sort(np.argsort(-choice, -1, kind="stable")[:, :k], -1)
        weights = np.take_along_axis(score, experts, -1)
        normalise, scale = c.get("norm_topk_prob", self.mixtral), c.get("routed_scaling_factor", 1)
        if normalise and k > 1:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        if c["model_type"] == "deepseek_v2" and normalise and k > 1:
            scale = 1
        return experts, weights * scale

    def mlp(self, x, at, names=("gate_proj", "up_proj", "down_proj")):
        gate, up, down = (at + name for name in names)
        return self.linear(silu(self.linear(x, gate)) * self.linear(x, up), down)

    def moe(self, x, at):
        names = ("w1", "w3", "w2") if self.mixtral else ("gate_proj", "up_proj", "down_proj")
        experts, weights = self.route(x, at)
        y = np.zeros_like(x)
        for e in np.unique(experts):
            rows, slots = np.nonzero(experts == e)
            y[rows] += weights[rows, slots, None] * self.mlp(x[rows], f"{at}experts.{e}.", names)
        if self.c.get("n_shared_experts"):
            y += self.mlp(x, at + "shared_experts.")
        return y, experts, weights

    def forward(self, ids):
        """Logits [positions, vocab] and (layer, experts, weights) of each MoE layer."""
        c, routes = self.c, []
        x = self.t["model.embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            attention = self.gqa if self.mixtral else self.mla
            x = x + attention(self.norm(x, at + "input_layernorm"), at + "self_attn.")
            h = self.norm(x, at + "post_attention_layernorm")
            if i < c.get("first_k_dense_replace", 0):
                x = x + self.mlp(h, at + "mlp.")
                continue
            y, experts, weights = self.moe(h, at + ("block_sparse_moe." if self.mixtral else "mlp."))
            routes.append((i, experts, weights))
            x = x + y
        return self.norm(x, "model.norm") @ self.t["lm_head.weight"].T, routes


def prompts(vocab):
    """The same as in oracle.py."""
    state, out = 12345, []
    for n in LENGTHS:
        ids = []
        for _ in range(n):
            state = (state * 1103515245 + 12345) % 2**31
            ids.append((state >> 16) % vocab)
        out.append(ids)
    return out


def rounded(values, digits):
    return [round(float(v), digits) for v in values]


def values_of(model):
    out = []
    for ids in prompts(model.c["vocab_size"]):
        logits, routes = model.forward(ids)
        greedy, margin = [], 1e9
        for _ in range(N_GREEDY):
            last = model.forward(ids + greedy)[0][-1]
            greedy.append(int(last.argmax()))
            margin = min(margin, float(np.diff(np.sort(last)[-2:])[0]))
        out.append({"ids": ids, "greedy": greedy, "greedy_margin": round(margin, 5),
                    "layers": [{"layer": i, "experts": e.tolist(), "weights_last": rounded(w[-1], 6)} for i, e, w in routes],
                    "logits": [{"pos": p, "logits": rounded(logits[p], 5)} for p in sorted({0, len(ids) // 2, len(ids) - 1})]})
    return out


def difference(model, values):
    """The largest difference of a logit; exits where an id or an expert differs."""
    worst = 0
    for prompt in values["prompts"]:
        logits, routes = model.forward(prompt["ids"])
        for row in prompt["logits"]:
            worst = max(worst, np.abs(logits[row["pos"]] - row["logits"]).max())
        for layer, (i, experts, weights) in zip(prompt["layers"], routes, strict=True):
            if layer["layer"] != i or layer["experts"] != experts.tolist():
                sys.exit(f"layer {i}: other experts")
            worst = max(worst, np.abs(weights[-1] - layer["weights_last"]).max())
        ids = prompt["ids"] + prompt["greedy"]
        best = model.forward(ids)[0].argmax(-1)[len(prompt["ids"]) - 1 : -1]
        if best.tolist() != prompt["greedy"]:
            sys.exit(f"greedy: want {prompt['greedy']}, got {best.tolist()}")
    return worst


def main():
    root = sys.argv[1]
    if len(sys.argv) == 4:
        model = Model(os.path.join(root, sys.argv[2]))
        with open(sys.argv[3], "w") as f:
            json.dump({"about": "numpy, float64 over dequantised weights", "prompts": values_of(model)}, f, separators=(",", ":"))
            f.write("\n")
        return
    bad = 0
    for name in sorted(os.listdir(root)):
        with open(os.path.join(root, name, "values.json")) as f:
            worst = difference(Model(os.path.join(root, name)), json.load(f))
        bad += not worst < 1e-5
        print(f"{name}: largest difference {worst:.1e}")
    sys.exit(bad > 0)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4):
        sys.exit(__doc__)
    main()
