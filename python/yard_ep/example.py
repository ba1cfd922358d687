"""Every rank sends eight tokens to random experts, which return their rows as they are.

    PYTHONPATH=python switchyard run --ranks 2 -- python3 python/yard_ep/example.py
"""
import os

import torch

import yard_ep

TOKENS, TOP_K, HIDDEN, EXPERTS = 8, 2, 1024, 16

torch.cuda.set_device(int(os.environ.get("YARD_RANK", "0")) % torch.cuda.device_count())
group = yard_ep.Group(n_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS,
                      dispatch=yard_ep.BF16, input=yard_ep.BF16)
torch.manual_seed(group.rank)
x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
expert = torch.stack([torch.randperm(EXPERTS, device="cuda")[:TOP_K] for _ in range(TOKENS)]).int()
weight = torch.full((TOKENS, TOP_K), 0.5, device="cuda")
n_tokens = torch.tensor([TOKENS], device="cuda", dtype=torch.int32)

rows, _, count, _ = group.dispatch(x, expert, weight, n_tokens)
y = group.combine(rows)  # the experts' kernels would stand between
torch.cuda.synchronize()
group.poll()
print(f"rank {group.rank} of {group.size} ({group}): {int(count.sum())} rows came here, "
      f"largest difference {float((y - x).abs().max()):g}")
group.close()
