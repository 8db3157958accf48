"""Check that a recorded program does not deadlock: one thread allocates tensors, another frees them.

    python scripts/stress_recorder.py [--minutes 8]

Needs a GPU and torch. torch's allocator holds a lock while it calls CUDA, and a thread that drops a tensor
takes that lock while it holds the GIL: a recorder that waited for the GIL would deadlock. Prints the number
of steps and the longest time without a step for each thread; exits with 1 if that time exceeds the limit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

PROGRAM = """
import gc, queue, sys, threading, time
import torch

end = time.monotonic() + 60 * float(sys.argv[1])
tensors = queue.Queue(maxsize=64)
steps, stalls = [0, 0], [0.0, 0.0]

def repeat(number, step):
    last = time.monotonic()
    while (now := time.monotonic()) < end:
        stalls[number] = max(stalls[number], now - last)
        last = now
        step()
        steps[number] += 1

def allocate():
    tensor = torch.empty(1 << (10 + steps[0] % 17), device="cuda")
    tensor.add_(1)
    torch.cuda.Event().record()
    if steps[0] % 97 == 0:
        torch.cuda.empty_cache()
    try:
        tensors.put_nowait([tensor])
    except queue.Full:
        pass

def drop():
    side = torch.cuda.Stream()
    try:
        holder = tensors.get(timeout=0.1)
    except queue.Empty:
        return
    holder[0].record_stream(side)
    holder.append(holder)  # A cycle: the garbage collector drops the tensor, in the thread in which it runs.
    del holder
    if steps[1] % 13 == 0:
        gc.collect()

dropper = threading.Thread(target=repeat, args=(1, drop))
dropper.start()
repeat(0, allocate)
dropper.join()
torch.cuda.synchronize()
print(*steps, *(f"{stall:.3f}" for stall in stalls))
"""

# The maximum time without a step, which is far longer than any step.
MAX_STALL_S = 20.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    minutes = parser.parse_args().minutes
    command = [sys.executable, "-P", "-m", "cudakit", "run", "--sanitize", "--"]
    program = [sys.executable, "-c", PROGRAM, str(minutes)]
    try:
        process = subprocess.run(
            [*command, *program], stdout=subprocess.PIPE, text=True, timeout=60 * minutes + 120
        )
    except subprocess.TimeoutExpired:
        print(f"deadlock: the program did not end within {minutes + 2:g} minutes")
        return 1
    allocated, dropped, *stalls = process.stdout.split() or ("0", "0", "inf", "inf")
    print(
        f"{minutes:g} minutes: {allocated} allocations, {dropped} tensors dropped, exit {process.returncode}"
    )
    print(f"longest time without a step: {stalls[0]} s allocating, {stalls[1]} s dropping")
    return 0 if process.returncode == 0 and max(map(float, stalls)) < MAX_STALL_S else 1


if __name__ == "__main__":
    sys.exit(main())
