"""Train a projection through FlashAttention; ``race`` does not wait for the copy of its input."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from side_stream import train

model = torch.nn.Linear(256, 768).cuda().bfloat16()
tokens = torch.randn(4, 128, 256, dtype=torch.bfloat16)


def loss(model, x):
    query, key, value = model(x).unflatten(2, (3, 4, 64)).permute(2, 0, 3, 1, 4)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
    return attended.float().square().mean()


train(model, tokens, race=sys.argv[1] == "race", loss=loss)
