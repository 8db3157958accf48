"""race: A compiled function on a side stream reads memory that another call of it writes.

fixed: A compiled function on a side stream reads memory that another call of it wrote, after the stream
  has waited for that call.
"""

import os
import sys

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch

race = sys.argv[1] == "race"


@torch.compile
def wave(numbers, results):
    results.copy_(torch.sin(numbers) * 2)


side, main = torch.cuda.Stream(), torch.cuda.current_stream()
numbers, once, twice = (torch.ones(10_000, device="cuda") for _ in range(3))
wave(numbers, once)  # compile it first
torch.cuda.synchronize()

wave(numbers, once)
if not race:
    side.wait_stream(main)
with torch.cuda.stream(side):
    # WRONG if race: the first result may not be complete.
    wave(once, twice)
torch.cuda.synchronize()
