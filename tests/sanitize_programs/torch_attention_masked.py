"""Train a projection through attention with a mask and dropout; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import train

model = torch.nn.Linear(256, 768).cuda()


def loss(model, x, is_visible):
    query, key, value = model(x).unflatten(2, (3, 4, 64)).permute(2, 0, 3, 1, 4)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=is_visible, dropout_p=0.1
    )
    return attended.square().mean()


# Each token sees itself, so that no row of the mask is empty.
mask = (torch.rand(4, 1, 128, 128) < 0.5) | torch.eye(128, dtype=torch.bool)
train(model, torch.randn(4, 128, 256), mask, race=sys.argv[1] == "race", loss=loss)
