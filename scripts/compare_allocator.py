"""Compare cudakit's caching allocator with PyTorch's: the same operations through both, on one GPU.

    python scripts/compare_allocator.py                 # all scenarios and the long random runs
    python scripts/compare_allocator.py --only 23 101   # only these scenarios
    python scripts/compare_allocator.py --dry-run       # only cudakit's allocator, in memory, without a GPU

At each check of a scenario, all numbers of torch.cuda.memory_stats must be equal, and the snapshots except
for addresses, handles and times: segments, blocks, states, pools, trace, settings. Both allocators begin with
an empty cache. The best fit depends on the order of addresses, which the driver chooses: if the results
differ, the scenario is repeated with cudakit's allocator at PyTorch's addresses, and the table says so. When
a pool is restored to a checkpoint, PyTorch iterates over the segments in the order of a hash set of pointers:
then the trace is compared segment by segment, and the peaks of any order are accepted.

Prints a row with the differences for each scenario, and the totals; -o FILE writes both as JSON. Exits with 1
if a result differs from PyTorch or from the expectation of the scenario.
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
sys.path.append(str(ROOT / "tests"))  # The scenarios belong to the tests.

from allocator_scenarios.canonical import Addresses  # noqa: E402 found by the line above
from allocator_scenarios.catalog import SCENARIOS  # noqa: E402
from allocator_scenarios.compare import Verdict, as_row, compare_subjects  # noqa: E402
from allocator_scenarios.cudakit_subject import CudakitSubject, in_memory  # noqa: E402
from allocator_scenarios.scenario import Scenario, Subject  # noqa: E402
from allocator_scenarios.upstreams import UpstreamAtAddresses  # noqa: E402

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


def main() -> int:
    options = parse_options()
    scenarios = [
        scenario for scenario in SCENARIOS if not options.only or scenario.number in options.only
    ]
    if not scenarios:
        numbers = ", ".join(map(str, sorted({scenario.number for scenario in SCENARIOS})))
        sys.exit(f"unknown scenario; known numbers: {numbers}")
    new_cudakit, torch_subject, about = dry_run_subjects() if options.dry_run else gpu_subjects()
    verdicts = []
    for scenario in scenarios:
        verdict = skipped_verdict(scenario) if options.dry_run else None
        verdicts.append(verdict or compare_subjects(scenario, new_cudakit, torch_subject))
        print_verdict(verdicts[-1])
    print(totals(verdicts, about))
    if options.output:
        document = {"about": about, "scenarios": [as_row(verdict) for verdict in verdicts]}
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(verdict.problems for verdict in verdicts))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare cudakit's allocator with PyTorch's.")
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument(
        "--dry-run", action="store_true", help="run cudakit's allocator only, without a GPU"
    )
    return parser.parse_args()


def dry_run_subjects() -> tuple[Callable[[Addresses], Subject], None, dict[str, Any]]:
    """Return a function that creates cudakit's allocator, None instead of PyTorch's, and the versions."""
    return in_memory, None, {"device": "in memory", "torch": None}


def gpu_subjects() -> tuple[Callable[[Addresses], Subject], Subject, dict[str, Any]]:
    """Return a function that creates cudakit's allocator, PyTorch's allocator, and the versions."""
    import torch
    from allocator_scenarios.streams_at_work import WorkOnGpu
    from allocator_scenarios.torch_subject import TorchSubject

    from cudakit.allocator.upstream import GpuUpstream
    from cudakit.gpu.cuda.device import Cuda

    if set_variables := [name for name in VARIABLES if name in os.environ]:
        sys.exit(f"PyTorch must run with default settings: unset {', '.join(set_variables)}")
    gpu = Cuda(0)
    torch_subject, work = TorchSubject(gpu), WorkOnGpu(gpu)

    def new_cudakit(addresses: Addresses) -> Subject:
        upstream = GpuUpstream(gpu)
        return CudakitSubject(
            UpstreamAtAddresses(upstream, addresses) if addresses else upstream, work
        )

    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "statistics": len(torch.cuda.memory_stats(0)),
    }
    return new_cudakit, torch_subject, about


def skipped_verdict(scenario: Scenario) -> Verdict | None:
    if not scenario.without_memory:
        return None
    return Verdict(scenario.number, scenario.name, not_compared_reason=scenario.without_memory)


def print_verdict(verdict: Verdict) -> None:
    print(
        f"{verdict.number:>4}  {verdict.name:<58} {verdict.checks:>3}  {verdict.summary}",
        flush=True,
    )
    for problem in verdict.problems:
        print(f"        {problem}")


def totals(verdicts: list[Verdict], about: dict[str, Any]) -> str:
    without_problems = [verdict for verdict in verdicts if not verdict.problems]
    equal = [verdict for verdict in without_problems if not verdict.not_compared_reason]
    checks = sum(verdict.checks for verdict in verdicts)
    placed = sum(verdict.at_torch_addresses for verdict in verdicts)
    return (
        f"{len(verdicts)} scenarios, {checks} checks: {len(equal)} equal ({placed} at PyTorch's "
        f"addresses), {len(verdicts) - len(without_problems)} with problems, "
        f"{len(without_problems) - len(equal)} not compared"
        f" ({about['device']}, PyTorch {about['torch']})"
    )


if __name__ == "__main__":
    sys.exit(main())
