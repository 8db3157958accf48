"""Measure the run time of ``cudakit devices`` and of nvidia-smi, and the CPU use of ``--watch``.

    python scripts/bench_devices.py

Prints medians of nine runs of the command, of ``nvidia-smi`` and of an empty Python program; the limit,
which is max(0.5 s, nvidia-smi + Python); and the share of a core that ``--watch 1`` uses. Exits with 1 if a
limit is exceeded.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 9
SETTLING_SECONDS = 3
WATCHED_SECONDS = 20
DEVICES = [sys.executable, "-P", "-m", "cudakit", "devices"]
COMMANDS = {
    "cudakit devices": DEVICES,
    "nvidia-smi": ["nvidia-smi"],
    "python -c pass": [sys.executable, "-c", "pass"],
}
MINIMUM_LIMIT_SECONDS = 0.5
MAXIMUM_CORE_SHARE = 0.01


def wall(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def medians() -> dict[str, float]:
    """Return the median time of each command; they run in turn, so that other load affects all alike."""
    rounds = [{name: wall(line) for name, line in COMMANDS.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(times[name] for times in rounds) for name in COMMANDS}


def watch_share() -> float:
    """Return the share of a core that ``--watch`` uses after its start."""
    child = subprocess.Popen([*DEVICES, "--watch", "1"], stdout=subprocess.DEVNULL)
    time.sleep(SETTLING_SECONDS)
    before, start = processor_seconds(child.pid), time.perf_counter()
    time.sleep(WATCHED_SECONDS)
    spent, passed = processor_seconds(child.pid) - before, time.perf_counter() - start
    child.send_signal(signal.SIGINT)
    if child.wait(timeout=10):
        raise SystemExit(f"--watch ended with {child.returncode}")
    return spent / passed


def processor_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds (/proc/PID/schedstat)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    times = medians()
    for name, seconds in times.items():
        print(f"{name:16} {seconds:.3f} s")
    limit = max(MINIMUM_LIMIT_SECONDS, times["nvidia-smi"] + times["python -c pass"])
    share = watch_share()
    fast, light = times["cudakit devices"] <= limit, share < MAXIMUM_CORE_SHARE
    print(f"limit            {limit:.3f} s: {'ok' if fast else 'EXCEEDED'}")
    print(f"--watch 1        {share:.2%} of a core: {'ok' if light else 'EXCEEDED'}")
    return 0 if fast and light else 1


if __name__ == "__main__":
    sys.exit(main())
