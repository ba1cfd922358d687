#!/usr/bin/env python3
"""Reference values of the small checkpoints in tests/golden/families, from transformers in float32.
oracle.py CHECKPOINTS OUT     (writes OUT/NAME/values.json for each directory NAME of CHECKPOINTS)

Weights are bf16, made by `switchyard synth`; no FP8, whose partial blocks transformers misreads. Nothing is cached between
tokens, so that a value depends on its sequence alone."""
import json, os, sys, tempfile

try:
    import torch
    from transformers import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, MixtralForCausalLM
except ImportError as error:
    sys.exit(f"oracle: {error}. Needed: torch 2.11, transformers 5.17; PYTHON=... chooses another interpreter.")

CLASSES = {c.__name__: c for c in (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, MixtralForCausalLM)}
LENGTHS, N_GREEDY = (3, 41, 90), 20
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("highest")
torch.backends.cuda.matmul.allow_tf32 = False


def rounded(values, digits=5):
    return [round(float(v), digits) for v in values]


def load(path, config):
    """transformers has no kimi_k2 of its own: its architecture is DeepseekV3ForCausalLM."""
    cls = CLASSES[config["architectures"][0]]
    with tempfile.TemporaryDirectory() as copy:
        for name in os.listdir(path):
            if name.startswith("model"):
                os.symlink(os.path.abspath(os.path.join(path, name)), os.path.join(copy, name))
        with open(os.path.join(copy, "config.json"), "w") as f:
            json.dump(dict(config, model_type=cls.config_class.model_type), f)
        model, info = cls.from_pretrained(copy, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            sys.exit(f"{path}: {kind}: {sorted(info[kind])[:3]}")
    return model.to(device).eval()


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids], device=device), use_cache=False).logits[0].float()


def greedy(model, ids):
    out, margin = [], 1e9
    for _ in range(N_GREEDY):
        values, best = logits_of(model, ids + out)[-1].topk(2)
        out.append(int(best[0]))
        margin = min(margin, float(values[0] - values[1]))
    return out, margin


def routes(model, ids):
    """For each MoE layer: ids of each position ascending, and the last position's weights in that order."""
    found, hooks = {}, []
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(lambda m, a, o, i=i: found.__setitem__(i, o)))
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    layers = []
    for i in sorted(found):
        _, weights, experts = found[i]
        experts, order = experts.sort(dim=-1)
        weights = weights.gather(1, order)
        layers.append({"layer": i, "experts": experts.tolist(), "weights_last": rounded(weights[-1], 6)})
    return layers


def prompts(vocab):
    """Ids from a fixed generator of our own: torch's may change."""
    state, out = 12345, []
    for n in LENGTHS:
        ids = []
        for _ in range(n):
            state = (state * 1103515245 + 12345) % 2**31
            ids.append((state >> 16) % vocab)
        out.append(ids)
    return out


def main():
    checkpoints, out = sys.argv[1:3]
    for name in sorted(os.listdir(checkpoints)):
        path = os.path.join(checkpoints, name)
        if not os.path.isdir(path):
            continue
        with open(os.path.join(path, "config.json")) as f:
            config = json.load(f)
        if "quantization_config" in config:
            continue  # reference.py's
        model, values, smallest = load(path, config), [], 1e9
        for ids in prompts(config["vocab_size"]):
            logits = logits_of(model, ids)
            tokens, margin = greedy(model, ids)
            smallest = min(smallest, margin)
            values.append({"ids": ids, "greedy": tokens, "greedy_margin": round(margin, 5), "layers": routes(model, ids),
                           "logits": [{"pos": p, "logits": rounded(logits[p])} for p in sorted({0, len(ids) // 2, len(ids) - 1})]})
        os.makedirs(os.path.join(out, name), exist_ok=True)
        with open(os.path.join(out, name, "values.json"), "w") as f:
            json.dump({"about": "transformers, float32", "prompts": values}, f, separators=(",", ":"))
            f.write("\n")
        print(f"{name}: {len(values)} prompts, smallest greedy margin {smallest:.4f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main()
