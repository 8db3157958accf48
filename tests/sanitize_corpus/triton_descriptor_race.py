"""A kernel loads boxes of a matrix by its tensor map while another one changes some of their columns."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


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
    matrix[:, 60:].fill_(0)  # WRONG: columns 60 to 63 are in the boxes
torch.cuda.synchronize()
