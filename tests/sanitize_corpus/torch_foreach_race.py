"""One kernel changes a list of tensors through a table of pointers; another stream reads one of them."""

import torch

side = torch.cuda.Stream()
weights = [torch.ones(1000 + number, device="cuda") for number in range(10)]
torch.cuda.synchronize()

torch._foreach_add_(weights[:8], 1.0)
with torch.cuda.stream(side):
    doubled = weights[5] * 2  # WRONG: it is one of the eight
torch.cuda.synchronize()
