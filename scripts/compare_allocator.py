"""Compare cudakit's caching allocator with PyTorch's: the same operations through both, on one GPU.

    python scripts/compare_allocator.py                 # all scenarios and the long random runs
    python scripts/compare_allocator.py --only 23 101   # only these scenarios
    python scripts/compare_allocator.py --dry-run       # cudakit's only, in memory, without a GPU

At each check of a scenario, all numbers of torch.cuda.memory_stats must be equal, and the snapshots except
for addresses, handles and times: segments, blocks, states, pools, trace, settings. Both allocators begin with
an empty cache. The best fit depends on the order of addresses, which the driver chooses: if the two runs
differ, cudakit's allocator runs again at PyTorch's addresses, and the table says so. When a pool is restored
to a checkpoint, PyTorch iterates over its segments in the order of a hash set of pointers: there the trace is
compared segment by segment, and peaks may be those of any order.

Prints a row for each scenario with its differences, and the totals; -o FILE writes them as JSON. Exits with 1
if anything differs from PyTorch or from the expectation of the scenario.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # the scenarios are part of the tests

from allocator_scenarios.canonical import Addresses  # noqa: E402 found by the line above
from allocator_scenarios.catalog import SCENARIOS  # noqa: E402
from allocator_scenarios.compare import Verdict, as_row, compare_subjects  # noqa: E402
from allocator_scenarios.cudakit_subject import Ours, in_memory  # noqa: E402
from allocator_scenarios.scenario import Scenario, Subject  # noqa: E402
from allocator_scenarios.upstreams import Placed  # noqa: E402

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def main() -> int:
    options = parsed()
    chosen = [s for s in SCENARIOS if not options.only or s.number in options.only]
    if not chosen:
        numbers = ", ".join(str(n) for n in sorted({s.number for s in SCENARIOS}))
        sys.exit(f"unknown scenario; known numbers: {numbers}")
    ours, theirs, about = alone() if options.dry_run else both()
    verdicts = []
    for scenario in chosen:
        verdict = skipped(scenario) if options.dry_run else None
        verdicts.append(verdict or compare_subjects(scenario, ours, theirs))
        show(verdicts[-1])
    print(sums(verdicts, about))
    if options.output:
        kept = {"about": about, "scenarios": [as_row(verdict) for verdict in verdicts]}
        options.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return int(any(verdict.problems for verdict in verdicts))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare cudakit's allocator with PyTorch's.")
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument(
        "--dry-run", action="store_true", help="run cudakit's allocator only, without a GPU"
    )
    return parser.parse_args()


def alone() -> tuple[Callable[[Addresses], Subject], None, dict[str, Any]]:
    return in_memory, None, {"device": "in memory", "torch": None}


def both() -> tuple[Callable[[Addresses], Subject], Subject, dict[str, Any]]:
    import torch
    from allocator_scenarios.streams_at_work import WorkOnGpu
    from allocator_scenarios.torch_subject import Torch

    from cudakit.core.allocator.upstream import GpuUpstream
    from cudakit.gpu.cuda.device import Cuda

    if changed := [name for name in VARIABLES if name in os.environ]:
        sys.exit(f"PyTorch must run with default settings: unset {', '.join(changed)}")
    gpu = Cuda(0)
    theirs, work = Torch(gpu), WorkOnGpu(gpu)

    def ours(addresses: Addresses) -> Subject:
        upstream = GpuUpstream(gpu)
        return Ours(Placed(upstream, addresses) if addresses else upstream, work)

    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "statistics": len(torch.cuda.memory_stats(0)),
    }
    return ours, theirs, about


def skipped(scenario: Scenario) -> Verdict | None:
    if not scenario.without_memory:
        return None
    return Verdict(scenario.number, scenario.name, not_compared=scenario.without_memory)


def show(verdict: Verdict) -> None:
    print(
        f"{verdict.number:>4}  {verdict.name:<58} {verdict.checks:>3}  {verdict.word}", flush=True
    )
    for problem in verdict.problems:
        print(f"        {problem}")


def sums(verdicts: list[Verdict], about: dict[str, Any]) -> str:
    equal = [v for v in verdicts if not v.problems and not v.not_compared]
    alone = [v for v in verdicts if not v.problems and v.not_compared]
    wrong = [v for v in verdicts if v.problems]
    checks = sum(verdict.checks for verdict in verdicts)
    placed = sum(verdict.placed for verdict in verdicts)
    return (
        f"{len(verdicts)} scenarios, {checks} checks: {len(equal)} equal ({placed} at PyTorch's "
        f"addresses), {len(wrong)} with problems, {len(alone)} not compared"
        f" ({about['device']}, PyTorch {about['torch']})"
    )


if __name__ == "__main__":
    sys.exit(main())
