"""Two kernels load and store boxes of one matrix by its tensor map, and their boxes overlap."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def double(boxes, column, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    boxes.store([row, column], boxes.load([row, column]) * 2)


side = torch.cuda.Stream()
matrix = torch.ones(256, 128, device="cuda")
boxes = TensorDescriptor.from_tensor(matrix, [32, 32])
torch.cuda.synchronize()

double[(8,)](boxes, 32, ROWS=32)
with torch.cuda.stream(side):
    double[(8,)](boxes, 48, ROWS=32)  # WRONG: columns 48 to 63 are in both boxes
torch.cuda.synchronize()
