"""Train with activation checkpointing; ``race`` does not wait for the copy of its input."""

import sys

import torch
from torch.utils.checkpoint import checkpoint

from side_stream import train

model = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).cuda()
inputs = torch.randn(8, 32, 128)
train(
    model,
    inputs,
    race=sys.argv[1] == "race",
    loss=lambda model, x: checkpoint(model, x, use_reentrant=False).square().mean(),
)
