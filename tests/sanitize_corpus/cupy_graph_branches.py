"""race: Two branches of a captured graph modify overlapping parts of one array.

fixed: Two branches of a captured graph modify the two halves of one array.
"""

import sys

import cupy

race = sys.argv[1] == "race"

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
numbers = cupy.ones(10_000, "f4")
low = numbers[:5000]
# WRONG if race: one shared element, and no edge between the branches
high = numbers[(4999 if race else 5000) :]
cupy.cuda.Device().synchronize()
with first:
    low += 1
    high *= 2
cupy.cuda.Device().synchronize()

first.begin_capture()
second.wait_event(first.record())
with first:
    low += 1
with second:
    high *= 2
first.wait_event(second.record())
graph = first.end_capture()
for _ in range(3):
    graph.launch(first)
cupy.cuda.Device().synchronize()
