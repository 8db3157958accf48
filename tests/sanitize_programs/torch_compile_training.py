"""Train by a compiled function, forward and backward; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import train

torch._inductor.config.compile_threads = 1
model = torch.nn.Sequential(
    torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 64)
)
compiled = torch.compile(model.cuda(), mode="default")
inputs = torch.randn(128, 256)
train(compiled, inputs, race=sys.argv[1] == "race", loss=lambda model, x: model(x).square().mean())
