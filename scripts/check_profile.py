"""Compare the savings that findings of a profile estimate with measured ones.

Each slow program of examples/profile is profiled; then it and its fixed version are timed without a profile,
in alternating processes. An estimate is good if it is within a third of the measured saving. Needs a GPU and
PyTorch. The exit code is 1 if a finding is missing or an estimate is not good.

    python scripts/check_profile.py [--rounds N] [NAME]...
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples" / "profile"
# The rule of the finding that each program shows.
RULES = {
    "launch_bound": "launch-bound",
    "host_wait": "host-wait",
    "pageable_copies": "pageable-copies",
    "data_loading": "data-loading",
    "allocation": "allocation",
    "serial_streams": "serial-streams",
    "small_gemms": "small-gemms",
}
TOLERANCE = 1 / 3
TIMEOUT_S = 30


def measure_ms(name: str) -> float:
    """Return the time of a step that a program prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    match = re.search(r"([\d.]+) ms per step", done.stdout)
    if match is None:
        sys.exit(f"{name} printed no time: {done.stdout}")
    return float(match[1])


def predict(name: str, rule: str) -> float | None:
    """Return the share of a step that the finding of a rule could save; None without the finding."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "profile.json"
        program = str(EXAMPLES / f"{name}.py")
        command = [
            sys.executable,
            "-P",
            "-m",
            "cudakit",
            "run",
            "--profile",
            "-o",
            str(path),
            program,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if not path.exists():
            print(done.stderr, file=sys.stderr)
            return None
        result = json.loads(path.read_text())
    found = {finding["rule"]: finding["saving_share"] for finding in result["findings"]}
    print(f"{name}: findings {found}", file=sys.stderr)
    return found.get(rule)


def main() -> int:
    """Print a table of all programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    is_good = True
    print(f"{'program':18}{'slow ms':>10}{'fixed ms':>10}{'measured':>10}{'estimate':>10}  good")
    for name, rule in RULES.items():
        if arguments.names and name not in arguments.names:
            continue
        estimate = predict(name, rule)
        pairs = [(measure_ms(name), measure_ms(f"{name}_fixed")) for _ in range(arguments.rounds)]
        slow, fixed = (statistics.median(times) for times in zip(*pairs, strict=True))
        saving = 1 - fixed / slow
        good = estimate is not None and abs(estimate - saving) <= TOLERANCE * saving
        is_good &= good
        shown = "none" if estimate is None else f"{estimate:.1%}"
        print(
            f"{name:18}{slow:10.3f}{fixed:10.3f}{saving:10.1%}{shown:>10}  {'yes' if good else 'NO'}",
            flush=True,
        )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
