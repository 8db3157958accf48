"""Rows are chosen by an index that stays out of those which another stream changes."""

import torch

side = torch.cuda.Stream()
table = torch.ones(1000, 33, device="cuda")
index = torch.arange(0, 500, 3, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    table[500:].mul_(2)
chosen = torch.index_select(table, 0, index)
torch.cuda.synchronize()
