"""Measure ``cudakit devices`` beside nvidia-smi, in one run.

    python scripts/bench_devices.py

Prints medians of nine: the command, ``nvidia-smi``, and a Python that does nothing; their limit,
max(0.5 s, nvidia-smi + Python); and the share of a core that ``--watch 1`` takes. Exits with 1 where one
of the limits is passed.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time

ROUNDS = 9
SECONDS = (3.0, 13.0)
DEVICES = [sys.executable, "-m", "cudakit", "devices"]
COMMANDS = {
    "cudakit devices": DEVICES,
    "nvidia-smi": ["nvidia-smi"],
    "python -c pass": [sys.executable, "-c", "pass"],
}
LEAST_LIMIT = 0.5
MOST_SHARE = 0.01


def wall(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def medians() -> dict[str, float]:
    """Run the commands in turn, so that what else the machine does meets all alike."""
    rounds = [{name: wall(line) for name, line in COMMANDS.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(each[name] for each in rounds) for name in COMMANDS}


def processor_seconds(command: list[str], seconds: float) -> float:
    """Let a command run for a while, stop it with Ctrl-C, and return the processor time it took."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    child.send_signal(signal.SIGINT)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    return usage.ru_utime + usage.ru_stime


def watch_share() -> float:
    """Return the share of a core that each further second of watching takes."""
    short, long = (processor_seconds([*DEVICES, "--watch", "1"], seconds) for seconds in SECONDS)
    return (long - short) / (SECONDS[1] - SECONDS[0])


def main() -> int:
    times = medians()
    for name, seconds in times.items():
        print(f"{name:16} {seconds:.3f} s")
    limit = max(LEAST_LIMIT, times["nvidia-smi"] + times["python -c pass"])
    share = watch_share()
    fast, light = times["cudakit devices"] <= limit, share < MOST_SHARE
    print(f"limit            {limit:.3f} s: {'kept' if fast else 'PASSED'}")
    print(f"--watch 1        {share:.2%} of a core: {'kept' if light else 'PASSED'}")
    return 0 if fast and light else 1


if __name__ == "__main__":
    sys.exit(main())
