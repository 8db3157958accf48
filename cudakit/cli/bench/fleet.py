"""``cudakit bench suite --ray``: measure all GPUs of a Ray cluster, and report which are slower than others.

Ray imports this module on each host, to run ``describe_host`` and ``measure_gpu``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cudakit.cli.failure import ExitCode, held_interrupts
from cudakit.cli.output import (
    COMMON_FORMATS,
    OutputOptions,
    Report,
    open_outputs,
    printable,
    progress_line,
)

if TYPE_CHECKING:
    from cudakit.bench.fleet.result import FleetRecords, FleetResult, HostLink
    from cudakit.gpu.api.facts import CudaView, NvmlView
    from cudakit.units import Unavailable

FLEET_FORMATS = (*COMMON_FORMATS, "csv")


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """The options of ``bench suite`` that concern a fleet."""

    ray: str  # Address of the Ray cluster; "" if only the results directory is read.
    directory: str  # Results directory; "" for a new one.
    timeout_s: float  # Time in which a host must answer, and its GPUs must become free.
    quick: bool  # Whether the suite is a quick one.
    gpu: str  # Value of --gpu.


def measure_and_report(fleet: FleetRequest, output: OutputOptions) -> int:
    """Measure the GPUs of a cluster or read their results, write the report, and return the exit code."""
    from cudakit.bench.fleet.analysis import analyze
    from cudakit.bench.fleet.result import FleetRecords

    directory = fleet.directory or f"fleet-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    records = FleetRecords(Path(directory))
    with open_outputs(output, FLEET_FORMATS) as outputs:
        is_finished = not fleet.ray or _measure(fleet, records, quiet=output.quiet)
        result = analyze(records.read())
        outputs.write(_report(result))
    if not is_finished:
        return ExitCode.INTERRUPTED
    return ExitCode.FINDINGS if result.findings else ExitCode.OK


def _measure(fleet: FleetRequest, records: FleetRecords, *, quiet: bool) -> bool:
    """Measure the GPUs that have no result yet; return False after Ctrl-C."""
    from cudakit.bench.fleet.cluster import (
        FleetOptions,
        find_hosts,
        measure_fleet,
        open_cluster,
    )
    from cudakit.gpu.machine import open_machine

    argv = click.get_current_context().find_object(tuple)
    command = ("cudakit", *(argv or ()))
    options = FleetOptions(
        simulated=fleet.gpu.startswith("sim"),
        quick=fleet.quick,
        timeout_s=fleet.timeout_s,
        describe=describe_host,
        measure=measure_gpu,
        arguments=(fleet.gpu, fleet.quick, command),
    )
    if options.simulated:
        open_machine(fleet.gpu)  # Raises UsageError for an unknown model.
    # Ray prints its messages about dead processes on standard output, which must contain only the report.
    with (
        open(os.devnull, "w", encoding="utf-8") as discarded_output,
        redirect_stdout(discarded_output),
        open_cluster(fleet.ray, fleet.timeout_s) as cluster,
    ):
        hosts = find_hosts(cluster, simulated=options.simulated)
        records.create()
        if not quiet:
            click.echo(f"Writing results to {printable(str(records.directory))}", err=True)
        with (
            progress_line(quiet=quiet) as show_progress,
            held_interrupts() as deliver_interrupt,
        ):

            def progress(stage: str, fraction: float) -> None:
                show_progress(stage, fraction)
                deliver_interrupt()

            is_finished = measure_fleet(cluster, hosts, records, options, progress)
    if not is_finished and not records.has_files():
        raise KeyboardInterrupt
    return is_finished


def _report(result: FleetResult) -> Report:
    from cudakit.bench.fleet.report import present_fleet
    from cudakit.report import csv, html

    return Report(
        result=result,
        document=lambda: present_fleet(result),
        exports={
            "html": lambda: html.render(present_fleet(result, detail=True)),
            "csv": lambda: csv.render(present_fleet(result)),
        },
    )


# --- functions that run on the hosts ---------------------------------------------------------------


def describe_host(gpu: str, quick: bool, command: tuple[str, ...]) -> Iterator[str]:  # noqa: ARG001
    """Yield the JSON document of the facts about this host."""
    from cudakit.bench.fleet.result import HostFacts, dump_facts
    from cudakit.gpu.api.facts import CudaView
    from cudakit.gpu.machine import open_machine

    machine = open_machine(gpu)
    cuda = machine.cuda()
    versions = {name: version(name) for name in ("cudakit", "ray")}
    facts = HostFacts(
        name=platform.node(),
        gpu_count=len(cuda.devices) if isinstance(cuda, CudaView) else 0,
        simulated=machine.simulated,
        versions={**versions, "python": platform.python_version()},
        links=_host_links(machine.nvml(links=True)),
        gpu_uuids=_gpu_uuids(cuda),
    )
    yield dump_facts(facts)


def _host_links(nvml: NvmlView | Unavailable) -> tuple[HostLink, ...]:
    from cudakit.bench.fleet.result import HostLink
    from cudakit.units import Unavailable

    if isinstance(nvml, Unavailable):
        return ()
    uuid_by_index = {device.index: device.uuid for device in nvml.devices if device.parent is None}
    return tuple(
        HostLink(
            str(uuid_by_index.get(link.first, "")),
            str(uuid_by_index.get(link.second, "")),
            link.path,
        )
        for link in nvml.links
        if isinstance(link.path, str)
    )


def _gpu_uuids(cuda: CudaView | Unavailable) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in CUDA's order; nothing if CUDA does not report all of them."""
    from cudakit.units import Unavailable

    devices = () if isinstance(cuda, Unavailable) else cuda.devices
    uuids = tuple(device.uuid for device in devices if isinstance(device.uuid, str))
    return uuids if len(uuids) == len(devices) else ()


def measure_gpu(
    index: int, uuid: str, gpu: str, quick: bool, command: tuple[str, ...]
) -> Iterator[str]:
    """Yield "", then the JSON document of the suite on a GPU: a result or an error.

    The GPU is the one with the UUID, because Ray lists the GPUs of a task in any order; without a UUID, the
    one with the CUDA device index.
    """
    from cudakit.bench.suite import SuiteSpec, check_health
    from cudakit.errors import CudakitError
    from cudakit.gpu.machine import open_machine
    from cudakit.gpu.open import open_gpu
    from cudakit.gpu.run_context import gather
    from cudakit.report.json import render, render_error

    yield ""
    try:
        machine = open_machine(gpu)
        ordinal = _find_ordinal(uuid, machine.cuda()) if uuid else index
        run_context = gather(machine, variables=dict(os.environ), command=command, ordinal=ordinal)
        with closing(open_gpu(gpu, ordinal)) as device:
            result = check_health(SuiteSpec(quick=quick), device, run_context=run_context)
        yield render(result)
    except CudakitError as error:
        yield render_error(error, error.exit_code)


def _find_ordinal(uuid: str, cuda: CudaView | Unavailable) -> int:
    """Return the CUDA device index of a GPU in this process. Raises EnvironmentUnusable if it has none."""
    from cudakit.errors import EnvironmentUnusable

    uuids = _gpu_uuids(cuda)
    if uuid not in uuids:
        raise EnvironmentUnusable(
            f"Ray gave the task other GPUs than {uuid}: {', '.join(uuids) or 'none'}",
            hint="several Ray nodes of one host need different values of CUDA_VISIBLE_DEVICES",
        )
    return uuids.index(uuid)
