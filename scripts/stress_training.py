"""Train under ``cudakit run --sanitize`` for minutes, and check for hangs, leaks and false positives.

    python scripts/stress_training.py [--minutes 8] [--accesses auto] [-o FILE.json]

Needs a GPU and torch. The data of a small model is copied on a side stream; the host synchronizes every
20 steps. Prints ten samples: the number of steps, and the memory of the program, of the cudakit process
and of the device. Then prints the coverage. Exits with 1 for a race, a failure of the program, exact
accesses for less than 99% of the launches, a step of several seconds, or growing memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = """
import json, os, sys, time
import torch
from torch import nn

def resident_bytes(process):
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

torch.manual_seed(0)
side = torch.cuda.Stream()
layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(2048, 512)]
model = nn.Sequential(*layers, nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = [(torch.randn(64, 3, 32, 32).pin_memory(), torch.randint(0, 10, (64,)).pin_memory()) for _ in range(8)]

def copy_batch(number):
    with torch.cuda.stream(side):
        return [tensor.to("cuda", non_blocking=True) for tensor in data[number % len(data)]]

begin = last = time.monotonic()
seconds = 60 * float(sys.argv[1])
step = samples = 0
longest_step_s = 0.0
next_batch = copy_batch(0)
while last - begin < seconds:
    torch.cuda.current_stream().wait_stream(side)
    images, labels = next_batch
    for tensor in next_batch:
        tensor.record_stream(torch.cuda.current_stream())
    next_batch = copy_batch(step + 1)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    step += 1
    if step % 20 == 0:
        value = loss.item()
    now = time.monotonic()
    if step > 5:
        longest_step_s = max(longest_step_s, now - last)
    last = now
    if (last - begin) / seconds * 10 >= samples + 1:
        samples += 1
        free, total = torch.cuda.mem_get_info()
        print(json.dumps({
            "seconds": round(last - begin), "steps": step, "longest_step_s": round(longest_step_s, 3),
            "loss": round(value, 4), "program_mb": resident_bytes("self") >> 20,
            "cudakit_mb": resident_bytes(os.getppid()) >> 20, "device_mb": (total - free) >> 20,
        }), flush=True)
"""

MAX_STEP_S = 5.0
MIN_EXACT_SHARE = 0.99
# The maximum growth of memory from the third sample to the last.
MAX_GROWTH_MB = {"program_mb": 200, "cudakit_mb": 200, "device_mb": 300}


def run_recorded(minutes: float, accesses: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Run the program under cudakit; return the exit code, the samples that it printed, and the report."""
    with tempfile.TemporaryDirectory() as name:
        script, report_path = Path(name, "training.py"), Path(name, "report.json")
        script.write_text(PROGRAM, encoding="utf-8")
        cudakit = [sys.executable, "-P", "-m", "cudakit", "run", "--sanitize", "-q"]
        options = ["-o", str(report_path), "--accesses", accesses, "--python", sys.executable]
        command = [*cudakit, *options, "--", str(script), str(minutes)]
        samples = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                samples.append(json.loads(line))
        report = json.loads(report_path.read_text(encoding="utf-8")) if report_path.exists() else {}
        return process.returncode, samples, report


def find_problems(status: int, samples: list[dict[str, Any]], report: dict[str, Any]) -> list[str]:
    """Return a line for each exceeded limit."""
    if status or not report or len(samples) < 4:
        return [
            f"exit code {status} after {len(samples)} samples; races: {len(report.get('races', []))}"
        ]
    coverage, problems = report["coverage"], []
    launches = sum(
        coverage[f"launches_{precision}"] for precision in ("exact", "assumed", "unknown")
    )
    if coverage["launches_exact"] < MIN_EXACT_SHARE * launches:
        problems.append(
            f"only {coverage['launches_exact']:,} of {launches:,} launches have exact accesses"
        )
    if samples[-1]["longest_step_s"] > MAX_STEP_S:
        problems.append(f"a step took {samples[-1]['longest_step_s']} s")
    for name, max_growth in MAX_GROWTH_MB.items():
        growth = samples[-1][name] - samples[2][name]
        if growth > max_growth:
            problems.append(f"{name} grew by {growth}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--accesses", choices=["auto", "exact", "arguments"], default="exact")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    status, samples, report = run_recorded(options.minutes, options.accesses)
    print(json.dumps({"coverage": report.get("coverage"), "gaps": report.get("gaps")}))
    problems = find_problems(status, samples, report)
    for line in problems:
        print(f"FAILED: {line}")
    if options.output:
        result = {"status": status, "samples": samples, "report": report, "problems": problems}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{len(problems)} problems" if problems else "passed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
