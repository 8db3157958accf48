"""Measure the run time of ``cudakit devices`` and of nvidia-smi, and the CPU use of ``--watch``.

    python scripts/bench_devices.py

Prints the median time of nine runs of the command, of ``nvidia-smi`` and of an empty Python program; the
limit, which is max(0.5 s, nvidia-smi + Python); and the share of a core that ``--watch 1`` uses. Exits with 1
if a limit is exceeded.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 9
START_SECONDS = 3  # The time after the start that is not measured.
MEASURED_SECONDS = 20
DEVICES_COMMAND = [sys.executable, "-P", "-m", "cudakit", "devices"]
COMMANDS = {
    "cudakit devices": DEVICES_COMMAND,
    "nvidia-smi": ["nvidia-smi"],
    "python -c pass": [sys.executable, "-c", "pass"],
}
MIN_LIMIT_SECONDS = 0.5
MAX_CORE_SHARE = 0.01


def run_seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def median_seconds() -> dict[str, float]:
    """Return the median time of each command. The commands alternate: other load affects all equally."""
    rounds = [
        {name: run_seconds(command) for name, command in COMMANDS.items()} for _ in range(ROUNDS)
    ]
    return {name: statistics.median(times[name] for times in rounds) for name in COMMANDS}


def core_share_of_watch() -> float:
    """Return the share of a core that ``--watch`` uses after its start."""
    child = subprocess.Popen([*DEVICES_COMMAND, "--watch", "1"], stdout=subprocess.DEVNULL)
    time.sleep(START_SECONDS)
    before, start = cpu_seconds(child.pid), time.perf_counter()
    time.sleep(MEASURED_SECONDS)
    used_seconds, elapsed_seconds = cpu_seconds(child.pid) - before, time.perf_counter() - start
    child.send_signal(signal.SIGINT)
    if child.wait(timeout=10):
        raise SystemExit(f"--watch ended with {child.returncode}")
    return used_seconds / elapsed_seconds


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds (/proc/PID/schedstat)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    times = median_seconds()
    for name, seconds in times.items():
        print(f"{name:16} {seconds:.3f} s")
    limit = max(MIN_LIMIT_SECONDS, times["nvidia-smi"] + times["python -c pass"])
    share = core_share_of_watch()
    is_fast, is_light = times["cudakit devices"] <= limit, share < MAX_CORE_SHARE
    print(f"limit            {limit:.3f} s: {'ok' if is_fast else 'EXCEEDED'}")
    print(f"--watch 1        {share:.2%} of a core: {'ok' if is_light else 'EXCEEDED'}")
    return 0 if is_fast and is_light else 1


if __name__ == "__main__":
    sys.exit(main())
