"""Example fleets for tests, which need no device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.example_results import gemm, launch, machine, result, samples_near

from cudakit.bench.case import Method
from cudakit.bench.fleet.result import FleetGpu, FleetHost, HostFacts, HostLink
from cudakit.bench.health import SuiteResult, assess_health
from cudakit.bench.result import CaseResult
from cudakit.bench.summary import case_result
from cudakit.units import Unavailable

COPY_BYTES = 512 << 20
_ADDRESSES = {"node-a": "10.0.0.1", "node-b": "10.0.0.2"}
VERSIONS = {"cudakit": "0.1.0", "ray": "2.60.0", "python": "3.11.7"}


def copy(direction: str, rate: float, peer: int | None = None, **changes: Any) -> CaseResult:
    """Return the result of a copy that ran at a rate."""
    link = {} if peer is None else {"peer": peer, "access": "direct"}
    return case_result(
        "copy",
        {"direction": direction, **link, "size_bytes": COPY_BYTES},
        samples_near(COPY_BYTES / rate),
        method=Method("isolated", "hot"),
        limit=Unavailable("the link is unknown"),
        bytes_moved=COPY_BYTES,
        **{"environment": machine(), **changes},
    )


def gpu_cases(
    index: int,
    *,
    host: str = "node-a",
    gpu_count: int = 1,
    gemm_rate: float = 790e12,
    h2d_rate: float = 55e9,
    peer_rates: Mapping[int, float] | None = None,
    **changes: Any,
) -> tuple[CaseResult, ...]:
    """Return the cases of a suite: a launch, a GEMM, a copy from the host, and a copy to each other GPU."""
    environment = machine(uuid=gpu_uuid(host, index), **changes)
    rates = {peer: 400e9 for peer in range(gpu_count) if peer != index} | dict(peer_rates or {})
    return (
        launch(environment=environment),
        copy("h2d", h2d_rate, environment=environment),
        *(copy("peer", rate, peer, environment=environment) for peer, rate in rates.items()),
        gemm(rate=gemm_rate, environment=environment),
    )


def gpu_uuid(host: str, index: int) -> str:
    """Return the UUID of the GPU of an example host."""
    return f"GPU-{host}-{index}"


def fleet_gpu(index: int, *cases: CaseResult) -> FleetGpu:
    suite = assess_health(result(*cases, bench="suite"), quick=True, fields={})
    uuid = str(cases[0].environment.uuid)
    return FleetGpu(index, "NVIDIA H200", uuid, f"0000:0{index}:00.0", suite=suite)


def fleet_host(
    name: str = "node-a", gpu_count: int = 4, gpus: Mapping[int, Mapping[str, Any]] | None = None
) -> FleetHost:
    """Return a host of equal GPUs, except for the arguments of ``gpu_cases`` that ``gpus`` has by index."""
    uuids = tuple(gpu_uuid(name, i) for i in range(gpu_count))
    links = tuple(
        HostLink(uuids[first], uuids[second], "NV18")
        for first in range(gpu_count)
        for second in range(first + 1, gpu_count)
    )
    return FleetHost(
        HostFacts(
            name,
            _ADDRESSES.get(name, "10.0.0.9"),
            gpu_count,
            VERSIONS,
            links=links,
            gpu_uuids=uuids,
        ),
        tuple(
            fleet_gpu(i, *gpu_cases(i, host=name, gpu_count=gpu_count, **(gpus or {}).get(i, {})))
            for i in range(gpu_count)
        ),
    )


def failed_gpu(index: int, error: str, hint: str = "") -> FleetGpu:
    return FleetGpu(index, error=error, hint=hint)


def suite_of(gpu: FleetGpu) -> SuiteResult:
    assert isinstance(gpu.suite, SuiteResult)
    return gpu.suite
