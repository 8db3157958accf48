"""race: A host function signals that the stream has reached it, but the kernel comes after it.

fixed: A host function signals that the kernel before it is done, and the host waits for the signal.
"""

import sys
import threading

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers, reached = cupy.ones(10_000, "f4"), threading.Event()
cupy.cuda.Device().synchronize()

if race:
    first.launch_host_func(lambda event: event.set(), reached)
with first:
    numbers += 1
if not race:
    first.launch_host_func(lambda event: event.set(), reached)
reached.wait()
with second:
    # WRONG if race: the function ran before the kernel.
    numbers *= 2
cupy.cuda.Device().synchronize()
