"""One kernel changes a list of tensors through a table of pointers; another stream reads one that is not in it."""

import torch

side = torch.cuda.Stream()
weights = [torch.ones(1000 + number, device="cuda") for number in range(10)]
torch.cuda.synchronize()

torch._foreach_add_(weights[:8], 1.0)
with torch.cuda.stream(side):
    doubled = weights[8] * 2
torch.cuda.synchronize()
