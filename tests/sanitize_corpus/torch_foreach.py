"""race: One kernel changes a list of tensors through a table of pointers; another stream reads one of them.

fixed: One kernel changes a list of tensors through a table of pointers; another stream reads one that is not
  in it.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
weights = [torch.ones(1000 + number, device="cuda") for number in range(10)]
torch.cuda.synchronize()

torch._foreach_add_(weights[:8], 1.0)
with torch.cuda.stream(side):
    # WRONG if race: it is one of the eight
    doubled = weights[5 if race else 8] * 2
torch.cuda.synchronize()
