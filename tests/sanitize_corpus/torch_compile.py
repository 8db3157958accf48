"""race: A compiled function reads on a side stream what another call of it writes.

fixed: A compiled function reads on a side stream what another call of it wrote, and the stream waits for
  that.
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
wave(numbers, once)  # compiles it
torch.cuda.synchronize()

wave(numbers, once)
if not race:
    side.wait_stream(main)
with torch.cuda.stream(side):
    # WRONG if race: the first result may not be there.
    wave(once, twice)
torch.cuda.synchronize()
