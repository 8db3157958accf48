"""race: One kernel modifies a list of tensors through a pointer table; another stream reads one of them.

fixed: One kernel modifies a list of tensors through a pointer table; another stream reads a tensor outside
  the list.
"""

import sys

import torch

race = sys.argv[1] == "race"

side = torch.cuda.Stream()
weights = [torch.ones(1000 + number, device="cuda") for number in range(10)]
torch.cuda.synchronize()

torch._foreach_add_(weights[:8], 1.0)
with torch.cuda.stream(side):
    # WRONG if race: the list contains this tensor
    doubled = weights[5 if race else 8] * 2
torch.cuda.synchronize()
