"""Run compiled FlexAttention with a sliding window; ``race`` does not wait for the copy of its input."""

import sys

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from side_stream import run_steps

torch._inductor.config.compile_threads = 1
attend = torch.compile(flex_attention)
mask = create_block_mask(
    lambda _b, _h, q, k: (q >= k) & (q - k < 64), None, None, 256, 256, device="cuda"
)


def step(x):
    attend(x, x, x, block_mask=mask)


run_steps(step, torch.randn(2, 4, 256, 64, dtype=torch.float16), race=sys.argv[1] == "race")
