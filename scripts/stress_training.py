"""Train for minutes under ``cudakit run --sanitize``: no hang, no leak and no alarm may come of it.

    python scripts/stress_training.py [--minutes 8] [--accesses exact] [-o FILE.json]

Needs a GPU and torch. The model is small, and its data comes over a stream of its own; the host waits for a
loss now and then. Prints, once in a tenth of the time, the steps so far and the memory of the program, of
cudakit that watches it, and of the device; then what the report says. Ends with 1 for a race, an exit code,
kernels that are not known exactly, a step that took seconds, or memory that grows.
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

def fetched(number):
    with torch.cuda.stream(side):
        return [each.to("cuda", non_blocking=True) for each in data[number % len(data)]]

begin = last = time.monotonic()
seconds = 60 * float(sys.argv[1])
step = told = 0
longest = 0.0
next_batch = fetched(0)
while last - begin < seconds:
    torch.cuda.current_stream().wait_stream(side)
    images, labels = next_batch
    for each in next_batch:
        each.record_stream(torch.cuda.current_stream())
    next_batch = fetched(step + 1)
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
        longest = max(longest, now - last)
    last = now
    if (last - begin) / seconds * 10 >= told + 1:
        told += 1
        free, total = torch.cuda.mem_get_info()
        print(json.dumps({
            "seconds": round(last - begin), "steps": step, "longest_step_s": round(longest, 3),
            "loss": round(value, 4), "program_mb": resident_bytes("self") >> 20,
            "cudakit_mb": resident_bytes(os.getppid()) >> 20, "device_mb": (total - free) >> 20,
        }), flush=True)
"""

MOST_STEP_S = 5.0
LEAST_EXACT = 0.99
# From the third tenth of the time to the last one.
MOST_GROWTH_MB = {"program_mb": 200, "cudakit_mb": 200, "device_mb": 300}


def watched(minutes: float, accesses: str) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Run the program, and return how it ended, what it told and the report."""
    with tempfile.TemporaryDirectory() as name:
        script, report = Path(name, "training.py"), Path(name, "report.json")
        script.write_text(PROGRAM, encoding="utf-8")
        command = [
            sys.executable,
            "-P",
            "-m",
            "cudakit",
            "run",
            "--sanitize",
            "-q",
            "-o",
            str(report),
        ]
        command += [
            "--accesses",
            accesses,
            "--python",
            sys.executable,
            "--",
            str(script),
            str(minutes),
        ]
        told = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            for line in running.stdout or ():
                print(line, end="", flush=True)
                told.append(json.loads(line))
        said = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        return running.returncode, told, said


def complaints(status: int, told: list[dict[str, Any]], said: dict[str, Any]) -> list[str]:
    """Say what is wrong."""
    if status or not said or len(told) < 4:
        return [
            f"it ended with {status} after {len(told)} tenths; races: {len(said.get('races', []))}"
        ]
    coverage, wrong = said["coverage"], []
    kernels = sum(coverage[f"launches_{how}"] for how in ("exact", "assumed", "unknown"))
    if coverage["launches_exact"] < LEAST_EXACT * kernels:
        wrong.append(
            f"only {coverage['launches_exact']:,} of {kernels:,} kernels are known exactly"
        )
    if told[-1]["longest_step_s"] > MOST_STEP_S:
        wrong.append(f"a step took {told[-1]['longest_step_s']} s")
    for name, most in MOST_GROWTH_MB.items():
        growth = told[-1][name] - told[2][name]
        if growth > most:
            wrong.append(f"{name} grew by {growth}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--accesses", choices=["exact", "arguments"], default="exact")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    status, told, said = watched(options.minutes, options.accesses)
    print(json.dumps({"coverage": said.get("coverage"), "gaps": said.get("gaps")}))
    wrong = complaints(status, told, said)
    for line in wrong:
        print(f"WRONG {line}")
    if options.output:
        result = {"status": status, "told": told, "report": said, "wrong": wrong}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("as it should be" if not wrong else f"{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
