"""Train a two-layer GRU with dropout by cuDNN; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import train

model = torch.nn.GRU(256, 256, 2, batch_first=True, dropout=0.1).cuda()
inputs = torch.randn(32, 50, 256)
train(model, inputs, race=sys.argv[1] == "race", loss=lambda model, x: model(x)[0].square().mean())
