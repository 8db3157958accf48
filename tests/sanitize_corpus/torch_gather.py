"""race: Rows are gathered by an index that includes rows which another stream modifies.

fixed: Rows are gathered by an index that excludes the rows which another stream modifies.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
table = torch.ones(1000, 33, device="cuda")
index = torch.arange(0, 600 if race else 500, 3, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    table[500:].mul_(2)
# WRONG if race: the index goes up to 597.
chosen = torch.index_select(table, 0, index)
torch.cuda.synchronize()
