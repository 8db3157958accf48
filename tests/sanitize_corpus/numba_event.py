"""race: A kernel's stream waits for an event recorded after the copy to the device, but before the other
  stream's kernel.

fixed: A kernel's stream waits for an event recorded after the other stream's kernel.
"""

import sys

import numpy as np
from numba import cuda

race = sys.argv[1] == "race"


@cuda.jit
def double(numbers):
    i = cuda.grid(1)
    if i < numbers.size:
        numbers[i] *= 2


first, second = cuda.stream(), cuda.stream()
done = cuda.event(timing=False)
numbers = cuda.to_device(np.ones(2048, np.float32), stream=first)
if race:
    done.record(first)  # WRONG: too early
double[8, 256, first](numbers)
if not race:
    done.record(first)
done.wait(second)
double[8, 256, second](numbers)
cuda.synchronize()
