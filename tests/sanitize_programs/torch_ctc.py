"""Train by the CTC loss, which scans over time; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import train

model = torch.nn.Linear(40, 30).cuda()
labels = torch.randint(1, 30, (8, 12), device="cuda")
lengths = torch.full((8,), 12), torch.full((8,), 50)


def loss(model, frames):
    scores = model(frames).log_softmax(-1).transpose(0, 1)
    return torch.nn.functional.ctc_loss(scores, labels, lengths[1], lengths[0])


train(model, torch.randn(8, 50, 40), race=sys.argv[1] == "race", loss=loss)
