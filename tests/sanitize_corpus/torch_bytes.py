"""race: Two streams fill two slices of bytes that overlap by one byte in the middle of a vector store.

fixed: Two streams fill two slices of bytes that meet in the middle of a vector store.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
numbers = torch.zeros(4003, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    numbers[:2001].fill_(1)
# WRONG if race: one byte too early
numbers[(2000 if race else 2001) :].fill_(2)
torch.cuda.synchronize()
