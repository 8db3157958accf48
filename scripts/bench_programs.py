"""Measure the cost of ``cudakit run --sanitize`` on programs: plain, auto, exact and PyTorch's CSAN in turn.

    python scripts/bench_programs.py 'real.py gpt' 'real.py resnet'          # 7 processes of each kind
    python scripts/bench_programs.py 'real.py gpt' --processes 3 --kinds plain,auto
    python scripts/bench_programs.py 'real.py gpt' --until 150 -o FILE.json   # start no process after 150 s

Each argument is a program with its arguments that prints a line "STEP NAME MILLISECONDS ms", the median time
of a step after the warm-up. The kinds of processes alternate, because the speed of one program differs from
process to process. Prints for each kind the median over the processes, the lowest and the highest time, the
ratio to plain, and the coverage and verdict of the last process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("plain", "auto", "exact", "csan")
_STEP = re.compile(r"STEP \S+ ([\d.]+)")


@dataclass(slots=True)
class Measurement:
    """The processes of one kind that ran one program."""

    step_ms: list[float] = field(default_factory=list)  # time of a step, of each process
    wall_s: list[float] = field(default_factory=list)  # time of each process
    failure: str = ""  # last line of a process that printed no time
    report: dict[str, Any] = field(default_factory=dict)  # cudakit's report of the last process

    def text(self, plain_ms: float | None) -> str:
        if not self.step_ms:
            return self.failure or "not run"
        median_ms = statistics.median(self.step_ms)
        ratio = f"{median_ms / plain_ms:6.2f} x" if plain_ms else " " * 8
        spread = f"{min(self.step_ms):.3f} to {max(self.step_ms):.3f}"
        processes = f"{len(self.step_ms)} processes of {statistics.median(self.wall_s):.1f} s"
        return f"{median_ms:9.3f} ms {ratio}  ({spread}; {processes}) {_verdict(self.report)}"


def _verdict(report: dict[str, Any]) -> str:
    """Return the races and the coverage of a report in one line."""
    if not report:
        return ""
    coverage = report["coverage"]
    counts = {
        name: coverage[key]
        for name, key in (
            ("exact", "launches_exact"),
            ("from template", "launches_from_template"),
            ("checks", "template_checks"),
            ("differences", "template_differences"),
            ("assumed", "launches_assumed"),
            ("unknown", "launches_unknown"),
        )
    }
    texts = [f"{len(report['races'])} races", f"{len(report.get('unverified', ()))} unverified"]
    texts += [f"{count:,} {name}" for name, count in counts.items()]
    return ", ".join([*texts, *(f"{count} x {gap}" for gap, count in report["gaps"].items())])


def command_of(kind: str, program: list[str], output: Path) -> list[str]:
    if kind in ("plain", "csan"):
        return [sys.executable, *program]
    run = [sys.executable, "-P", "-m", "cudakit", "run", "--sanitize", "-q", "-f"]
    return [*run, "--python", sys.executable, "--accesses", kind, "-o", str(output), "--", *program]


def measure(kind: str, program: list[str], seconds: float, measurement: Measurement) -> None:
    """Run one process, and add its time to the measurement."""
    environment = dict(os.environ) | ({"TORCH_CUDA_SANITIZER": "1"} if kind == "csan" else {})
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "report.json")
        start = time.perf_counter()
        try:
            process = subprocess.run(
                command_of(kind, program, output),
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            measurement.failure = f"not finished after {seconds:.0f} s"
            return
        wall_s = time.perf_counter() - start
        if output.exists():
            measurement.report = json.loads(output.read_text(encoding="utf-8") or "{}")
    if match := _STEP.search(process.stdout):
        measurement.step_ms.append(float(match[1]))
        measurement.wall_s.append(wall_s)
    else:
        lines = process.stderr.strip().splitlines()
        measurement.failure = lines[-1][:200] if lines else "no time was printed"


def measure_program(
    program: list[str], kinds: list[str], processes: int, deadline: float
) -> dict[str, Measurement]:
    """Run the kinds of processes in turn; ``deadline`` is a value of ``time.monotonic()``."""
    measurements = {kind: Measurement() for kind in kinds}
    for _ in range(processes):
        for kind, measurement in measurements.items():
            left_s = deadline - time.monotonic()
            if left_s > 0 and not measurement.failure:
                measure(kind, program, left_s + 20, measurement)
    return measurements


def table(name: str, measurements: dict[str, Measurement]) -> Iterator[str]:
    yield name
    plain = measurements.get("plain", Measurement()).step_ms
    plain_ms = statistics.median(plain) if plain else None
    for kind, measurement in measurements.items():
        yield f"  {kind:6} {measurement.text(plain_ms)}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="+", metavar="PROGRAM")
    parser.add_argument("--processes", type=int, default=7, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--until", type=float, default=86_400, metavar="S")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.until
    figures: dict[str, dict[str, Any]] = {}
    for text in options.programs:
        measurements = measure_program(
            shlex.split(text), options.kinds.split(","), options.processes, deadline
        )
        print(*table(text, measurements), sep="\n", flush=True)
        figures[text] = {kind: asdict(measurement) for kind, measurement in measurements.items()}
        if options.output:
            options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    has_times = all(run["step_ms"] for runs in figures.values() for run in runs.values())
    return 0 if has_times else 1


if __name__ == "__main__":
    sys.exit(main())
