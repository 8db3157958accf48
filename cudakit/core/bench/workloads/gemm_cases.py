"""The cases of ``bench gemm``: how each product is measured, what bounds it, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from cudakit.core.bench.arithmetic import matrix_kind
from cudakit.core.bench.case import Case
from cudakit.core.bench.limits import Work
from cudakit.core.bench.method import Method
from cudakit.core.bench.spec import GemmSpec
from cudakit.core.bench.stopping import Rule
from cudakit.core.bench.workloads.gemm import GemmWorkload
from cudakit.core.bench.workloads.operands import operand_bytes
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import Field
from cudakit.gpu.api.gemm import Gemm

# Launches take the host so long that in a shorter sample the device would rest for much of the time.
_SAMPLE_S = 10e-3
# In less time a power limit is not felt as it is in use.
_LEAST_S = 2.0
# Five steps of the energy counter of an H200, of which each is seen a few milliseconds late.
_ENERGY_S = 0.5
_EDGE = 256


def gemm_cases(spec: GemmSpec, gpu: Gpu) -> tuple[Case, ...]:
    """Make a case of each product."""
    fields = gpu.facts().fields
    return tuple(_case(spec, gemm, fields) for gemm in spec.gemms)


def _case(spec: GemmSpec, gemm: Gemm, fields: Mapping[str, Field]) -> Case:
    kind = matrix_kind(gemm.dtype, fields)
    shape = {"shape": spec.shapes[gemm]} if gemm in spec.shapes else {}
    own = GemmWorkload(gemm, spec.settings, spec.library, spec.fill, spec.algorithms.get(gemm))
    return Case(
        own,
        _method(spec),
        Work(gemm.operations, kind, gemm.bytes_moved),
        more_bytes=_needed_bytes(spec, gemm),
        fitting=partial(_fitting, spec, gemm),
        rivals=tuple(
            GemmWorkload(gemm, spec.settings, library, spec.fill) for library in spec.rivals
        ),
        operation="OP" if kind == "int8" else "FLOP",
        settings={**shape, "library": spec.library},
    )


def _method(spec: GemmSpec) -> Method:
    method = spec.method(spec.mode, spec.cache, fill=spec.fill)
    if spec.rule.min_time_s == Rule().min_time_s:  # nobody said for how long
        least_s = max(spec.rule.min_time_s, min(_LEAST_S, spec.rule.timeout_s / 2))
        method = replace(method, rule=replace(spec.rule, min_time_s=least_s))
    energy_s = _ENERGY_S if spec.mode in ("batch", "graph") else 0.0
    return replace(method, sample_s=_SAMPLE_S, energy_s=energy_s)


def _needed_bytes(spec: GemmSpec, gemm: Gemm) -> int:
    """Count one buffer set and one workspace of each library."""
    libraries = 1 + len(spec.rivals)
    return libraries * (operand_bytes(gemm) + spec.settings.workspace_bytes)


def _fitting(spec: GemmSpec, gemm: Gemm, usable_bytes: int) -> str:
    """Name the largest cube that fits, rounded down so that it can be read and typed."""
    low, high = 0, max(gemm.m, gemm.n, gemm.k)
    while high - low > 1:
        edge = (low + high) // 2
        fits = _needed_bytes(spec, replace(gemm, m=edge, n=edge, k=edge)) <= usable_bytes
        low, high = (edge, high) if fits else (low, edge)
    if not low:
        return "a smaller batch, or less workspace,"
    batch = f" with a batch of {gemm.batch}" if gemm.batch > 1 else ""
    return f"a cube of {low // _EDGE * _EDGE or low}{batch}"
