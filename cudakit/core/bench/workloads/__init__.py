"""The table of workloads: what makes the cases that a Spec asks for, by the name of the bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from cudakit.core.bench.case import Case
from cudakit.core.bench.workloads.alloc import alloc_cases
from cudakit.core.bench.workloads.copy import copy_cases
from cudakit.core.bench.workloads.gemm_cases import gemm_cases
from cudakit.core.bench.workloads.graph import graph_cases
from cudakit.core.bench.workloads.launch import launch_cases
from cudakit.core.bench.workloads.memory import memory_cases
from cudakit.gpu.api import Gpu

# Each takes the Spec of its bench; nothing is allocated until a case is prepared.
CasesOf: TypeAlias = Callable[[Any, Gpu], tuple[Case, ...]]

WORKLOADS: Mapping[str, CasesOf] = MappingProxyType(
    {
        "gemm": gemm_cases,
        "memory": memory_cases,
        "copy": copy_cases,
        "launch": launch_cases,
        "alloc": alloc_cases,
        "graph": graph_cases,
    }
)
