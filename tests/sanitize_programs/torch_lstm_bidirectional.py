"""Train a bidirectional LSTM by cuDNN; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import train

model = torch.nn.LSTM(128, 192, 2, batch_first=True, bidirectional=True).cuda()
inputs = torch.randn(16, 40, 128)
train(model, inputs, race=sys.argv[1] == "race", loss=lambda model, x: model(x)[0].abs().mean())
