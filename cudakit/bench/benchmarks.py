"""The benchmarks of ``cudakit bench``. Each is one file.

To add a benchmark NAME, write ``bench/NAME.py`` and a row of BENCHMARKS. The file has

* a subclass of Spec. Its docstring is the help of the command. Fields made by ``option``, ``sizes_option``,
  ``mode_option`` or ``cache_option`` are the options of the command; a field has its default if the user does
  not pass the option. ``__post_init__`` refuses invalid values. Options that do not map to fields one by one
  are converted by ``from_options``;
* ``Spec.cases(gpu)``: the cases, each a Workload with its method, theoretical work and baselines (``case``);
* the Workload. ``prepare(gpu, seed)`` returns a PreparedWorkload, which has allocated its buffers and filled
  them with data that depends on the seed, enqueues executions, and verifies what they computed;
* where the table of cases does not say it all: ``Spec.conclude``, which adds figures that need several cases,
  and ``Spec.words``, what the report says of this benchmark only (``words``).

``cli/bench/__init__.py`` makes the command of a Spec, and hands over what it needs from other packages.
Commands with more than a Spec, such as ``--tune``, have a file in ``cli/bench``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from cudakit.bench.result import CaseResult
from cudakit.bench.spec import Spec
from cudakit.bench.words import Words

# By name: module and class of the Spec, and the line in ``cudakit bench --help``. The module is imported
# when it is used. copy-overlap is ``bench copy --overlap``, which has no command of its own.
BENCHMARKS: Mapping[str, tuple[str, str]] = {
    "alloc": ("cudakit.bench.alloc:AllocSpec", "Latency of memory allocation and free."),
    "copy": (
        "cudakit.bench.copy:CopySpec",
        "Bandwidth of copies between host and device, and between GPUs.",
    ),
    "copy-overlap": ("cudakit.bench.overlap:OverlapSpec", ""),
    "gds": (
        "cudakit.bench.gds:GdsSpec",
        "Rate of transfers between files and device memory (GPUDirect Storage).",
    ),
    "gemm": (
        "cudakit.bench.gemm:GemmSpec",
        "GEMMs of cuBLAS and other libraries against the theoretical peak.",
    ),
    "graph": ("cudakit.bench.graph:GraphSpec", "Cost of CUDA graphs, and the time they save."),
    "launch": (
        "cudakit.bench.launch:LaunchSpec",
        "Latency of launches, events, waits and streams.",
    ),
    "memory": ("cudakit.bench.memory:MemorySpec", "Bandwidth of device memory and L2 cache."),
    "nccl": (
        "cudakit.bench.nccl:NcclSpec",
        "Bandwidth and latency of NCCL's collective operations.",
    ),
    "ops": (
        "cudakit.bench.ops:OpsSpec",
        "Add, matmul, softmax and sum of arrays, compared with torch and CuPy.",
    ),
}


def words_of(cases: Sequence[CaseResult]) -> Words:
    """Return the words of the benchmark of all cases; default words for cases of several."""
    names = {case.name for case in cases}
    return words_of_bench(names.pop()) if len(names) == 1 else Words()


def words_of_bench(name: str) -> Words:
    """Return the words of a benchmark; default words for other results, such as those of a suite."""
    return spec_class(name).words if name in BENCHMARKS else Words()


def spec_class(name: str) -> type[Spec]:
    """Return the Spec of a benchmark."""
    module, _, attribute = BENCHMARKS[name][0].partition(":")
    loaded: type[Spec] = getattr(import_module(module), attribute)
    return loaded
