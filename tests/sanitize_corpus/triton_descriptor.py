"""race: A kernel loads boxes of a matrix through a tensor map while another kernel modifies some columns.

fixed: A kernel loads boxes of a matrix through a tensor map; another kernel modifies adjacent columns.
"""

import sys

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

race = sys.argv[1] == "race"


@triton.jit
def double(results, boxes, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    row = tl.program_id(0) * SIZE
    box = boxes.load([row, 32])
    tl.store(results + (row + rows) * SIZE + columns, box * 2)


side = torch.cuda.Stream()
matrix = torch.ones(256, 128, device="cuda")
results = torch.empty(256, 32, device="cuda")
boxes = TensorDescriptor.from_tensor(matrix, [32, 32])
torch.cuda.synchronize()

double[(8,)](results, boxes, SIZE=32)
with torch.cuda.stream(side):
    # WRONG if race: columns 60 to 63 are in the boxes
    matrix[:, (60 if race else 64) :].fill_(0)
torch.cuda.synchronize()
