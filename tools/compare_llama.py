#!/usr/bin/env python3
"""Compare switchyard with llama.cpp on the CPU: one shape, two checkpoints, the same threads.

The shape is DeepSeek-V2-Lite's with fewer layers. Switchyard gets a random checkpoint of it with FP8
block weights (8.002 bits a weight), llama.cpp a random Q8_0 file (8.5 bits), or both get bf16
weights (--weights bf16); norms, routers, embedding and head are 16 or 32 bits in both. The values do
not matter for time, only that experts are chosen evenly. Both programs run one after the other, several times, and the best run of each
counts, so that a disturbance of the machine meets both alike.

    pip download --no-deps --no-binary :all: llama-cpp-python     # the source, llama.cpp in vendor/
    cmake -S vendor/llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF
    cmake --build build --target llama-bench
    pip install numpy gguf
    tools/compare_llama.py --llama-bench build/bin/llama-bench --threads 2

Rows go to standard output as `switchyard bench` prints them, a table to standard error.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPE = {
    "vocab_size": 102400, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1,
}


def write_config(path, layers, weights):
    config = {
        **SHAPE, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "num_hidden_layers": layers, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": None,
        "max_position_embeddings": 4096,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1,
    }
    if weights == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3",
                                         "activation_scheme": "dynamic",
                                         "weight_block_size": [128, 128]}
    path.write_text(json.dumps(config))


def write_gguf(path, layers, weights):
    import gguf
    import numpy

    random = numpy.random.default_rng(1)
    pattern = random.integers(-127, 128, 1 << 20, dtype=numpy.int8)

    def q8_0(*shape):
        n_blocks = int(numpy.prod(shape)) // 32
        blocks = numpy.empty((n_blocks, 34), numpy.uint8)
        scale = numpy.frombuffer(numpy.float16(0.02 / 127 * 1.7).tobytes(), numpy.uint8)
        blocks[:, :2] = scale
        blocks[:, 2:] = numpy.resize(pattern, n_blocks * 32).reshape(n_blocks, 32).view(numpy.uint8)
        return blocks.reshape(*shape[:-1], shape[-1] // 32 * 34)

    def bf16(*shape):
        values = numpy.resize(random.normal(0, 0.02, 1 << 20).astype(numpy.float32),
                              int(numpy.prod(shape)))
        return (values.view(numpy.uint32) >> 16).astype(numpy.uint16).reshape(shape).view(numpy.uint8)

    def f32(*shape):
        return random.normal(0, 0.02, shape).astype(numpy.float32)

    s = argparse.Namespace(**SHAPE)
    out = gguf.GGUFWriter(str(path), "deepseek2")
    out.add_block_count(layers)
    out.add_context_length(4096)
    out.add_embedding_length(s.hidden_size)
    out.add_feed_forward_length(s.intermediate_size)
    out.add_head_count(s.num_attention_heads)
    out.add_head_count_kv(1)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(s.qk_rope_head_dim)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_leading_dense_block_count(s.first_k_dense_replace)
    out.add_uint32("deepseek2.attention.q_lora_rank", 0)
    out.add_kv_lora_rank(s.kv_lora_rank)
    out.add_key_length(s.kv_lora_rank + s.qk_rope_head_dim)
    out.add_value_length(s.kv_lora_rank)
    out.add_key_length_mla(s.qk_nope_head_dim + s.qk_rope_head_dim)
    out.add_value_length_mla(s.v_head_dim)
    out.add_expert_count(s.n_routed_experts)
    out.add_expert_used_count(s.num_experts_per_tok)
    out.add_expert_feed_forward_length(s.moe_intermediate_size)
    out.add_expert_shared_count(s.n_shared_experts)
    out.add_expert_weights_scale(1.0)
    out.add_vocab_size(s.vocab_size)
    out.add_tokenizer_model("none")

    half = gguf.GGMLQuantizationType.BF16
    values, dtype = (q8_0, gguf.GGMLQuantizationType.Q8_0) if weights == "fp8" else (bf16, half)
    heads, inter = s.num_attention_heads, s.moe_intermediate_size
    shared = s.n_shared_experts * inter
    out.add_tensor("token_embd.weight", bf16(s.vocab_size, s.hidden_size), raw_dtype=half)
    out.add_tensor("output.weight", bf16(s.vocab_size, s.hidden_size), raw_dtype=half)
    out.add_tensor("output_norm.weight", numpy.ones(s.hidden_size, numpy.float32))
    for i in range(layers):
        tensors = {
            "attn_q": (heads * (s.qk_nope_head_dim + s.qk_rope_head_dim), s.hidden_size),
            "attn_kv_a_mqa": (s.kv_lora_rank + s.qk_rope_head_dim, s.hidden_size),
            "attn_k_b": (heads, s.kv_lora_rank, s.qk_nope_head_dim),
            "attn_v_b": (heads, s.v_head_dim, s.kv_lora_rank),
            "attn_output": (s.hidden_size, heads * s.v_head_dim),
        }
        if i < s.first_k_dense_replace:
            tensors |= {"ffn_gate": (s.intermediate_size, s.hidden_size),
                        "ffn_up": (s.intermediate_size, s.hidden_size),
                        "ffn_down": (s.hidden_size, s.intermediate_size)}
        else:
            n = s.n_routed_experts
            tensors |= {"ffn_gate_exps": (n, inter, s.hidden_size),
                        "ffn_up_exps": (n, inter, s.hidden_size),
                        "ffn_down_exps": (n, s.hidden_size, inter),
                        "ffn_gate_shexp": (shared, s.hidden_size),
                        "ffn_up_shexp": (shared, s.hidden_size),
                        "ffn_down_shexp": (s.hidden_size, shared)}
            out.add_tensor(f"blk.{i}.ffn_gate_inp.weight", f32(n, s.hidden_size))
        for name, shape in tensors.items():
            out.add_tensor(f"blk.{i}.{name}.weight", values(*shape), raw_dtype=dtype)
        for name, n in (("attn_norm", s.hidden_size), ("ffn_norm", s.hidden_size),
                        ("attn_kv_a_norm", s.kv_lora_rank)):
            out.add_tensor(f"blk.{i}.{name}.weight", numpy.ones(n, numpy.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def run(command):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {result.returncode}\n{result.stderr[-2000:]}")
    return result.stdout


def llama_rates(args, path):
    """Best tokens/s of each phase; llama-bench gives every repetition."""
    rates = {}
    for phase, n in (("prefill", ["-p", args.prompt, "-n", 0]),
                     ("decode", ["-p", 0, "-n", args.generate])):
        command = [args.llama_bench, "-m", path, "-t", args.threads, "-r", 2, "-o", "json", *n]
        rows = json.loads(run(list(map(str, command))))
        rates[phase] = max(rows[0]["samples_ts"])
        args.device = rows[0].get("cpu_info", "unknown processor")
    return rates


def switchyard_rates(args, folder):
    command = [args.switchyard, "bench", "engine", folder, "--threads", args.threads,
               "--prompt-tokens", args.prompt, "--batch", 1, "--decode-tokens", args.generate,
               "--repeat", 2, "--json"]
    if args.cpu_variant:
        command += ["--cpu-variant", args.cpu_variant]
    rates = {}
    for line in run(list(map(str, command))).splitlines():
        row = json.loads(line)
        if not row["verified"]:
            sys.exit("switchyard: a row was not verified")
        rates[row["case"]["phase"]] = row["case"]["tokens"] * 1e6 / row["min_us"]
        args.commit = row["commit"]
        args.device = row["device"]
    return rates


def print_rows(args, best):
    for phase, tokens in (("prefill", args.prompt), ("decode", 1)):
        for program in best:
            us = tokens * 1e6 / best[program][phase]
            print(json.dumps({
                "bench": "llama",
                "case": {"phase": phase, "program": program, "threads": args.threads,
                         "prompt_tokens": args.prompt if phase == "prefill" else 0,
                         "layers": args.layers, "weights": args.weights, "tokens": tokens,
                         "variant": (args.cpu_variant or "best") if program == "switchyard" else "-"},
                "p50_us": us, "p99_us": us, "min_us": us, "floor_us": None, "bytes": None,
                "flops": None, "verified": program == "switchyard", "device": args.device, "ranks": 1,
                "commit": args.commit, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}))
        ratio = best["switchyard"][phase] / best["llama.cpp"][phase]
        print(f"{phase:8} switchyard {best['switchyard'][phase]:9.1f} tokens/s   llama.cpp "
              f"{best['llama.cpp'][phase]:9.1f} tokens/s   {ratio:.2f} times as fast", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", required=True, help="llama.cpp's program of that name")
    parser.add_argument("--switchyard", default=ROOT / "build" / "switchyard")
    parser.add_argument("--work", type=pathlib.Path,
                        help="keep both checkpoints here (default: a temporary folder)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--weights", choices=("fp8", "bf16"), default="fp8",
                        help="fp8: FP8 blocks and Q8_0; bf16: bf16 and BF16")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--generate", type=int, default=64, help="tokens to generate")
    parser.add_argument("--rounds", type=int, default=3, help="runs of both, one after the other")
    parser.add_argument("--cpu-variant", help="of switchyard (default: its own choice)")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        folder, file = work / args.weights, work / f"{args.weights}.gguf"
        if not folder.exists():
            write_config(work / "config.json", args.layers, args.weights)
            run([args.switchyard, "synth", "--config", work / "config.json", "--out", folder])
        if not file.exists():
            write_gguf(file, args.layers, args.weights)
        best = {"switchyard": {}, "llama.cpp": {}}
        for _ in range(args.rounds):
            for program, rates in (("llama.cpp", llama_rates(args, file)),
                                   ("switchyard", switchyard_rates(args, folder))):
                for phase, rate in rates.items():
                    best[program][phase] = max(rate, best[program].get(phase, 0))
        print_rows(args, best)


if __name__ == "__main__":
    main()
