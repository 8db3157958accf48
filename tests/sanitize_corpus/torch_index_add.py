"""race: Rows are added to atomically on a side stream, and read concurrently.

fixed: Rows are added to on a side stream, and read afterwards.
"""

import sys

import torch

race = sys.argv[1] == "race"

side, main = torch.cuda.Stream(), torch.cuda.current_stream()
table = torch.zeros(50, 32, device="cuda")
index = torch.arange(1000, device="cuda") % 50
rows = torch.ones(1000, 32, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(side):
    table.index_add_(0, index, rows)
# WRONG if race: the sums may not be complete.
if not race:
    main.wait_stream(side)
means = table / 20
torch.cuda.synchronize()
