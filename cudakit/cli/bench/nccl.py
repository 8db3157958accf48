"""``cudakit bench nccl``: benchmark collective operations between GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import FORMATS, exit_code, report
from cudakit.cli.bench.options import (
    HELP_BY_TITLE,
    Effort,
    effort_options,
    mode_option,
    name_list,
    passed_options,
    sizes_option,
)
from cudakit.cli.failure import ExitCode, held_interrupts
from cudakit.cli.options import (
    FILE,
    Command,
    Seconds,
    gpu_option,
    option,
    option_group,
    output_options,
    with_options,
)
from cudakit.cli.output import OutputOptions, open_outputs, progress_line
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from cudakit.bench.collectives.group import RankGroup
    from cudakit.bench.collectives.launch import Launch
    from cudakit.bench.workloads.nccl import NcclSpec
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.api.facts import Machine, RunContext

# Options whose names differ from those of the fields of NcclSpec.
_OPTION_BY_FIELD = {
    "sizes_bytes": "--sizes",
    "dtypes": "--dtype",
    "baselines": "--vs",
    "warmup_s": "--warmup",
    "budget_s": "--budget",
    "rule": "the stopping rule",
    "blocker": "the blocker",
}
# Model of the machine that ``--gpu sim`` simulates: other models have only one GPU.
_SIMULATED_MACHINE = "sim:h200x2"
# Address of rank 0 if all ranks are threads of one process.
_THIS_HOST = "127.0.0.1"

_WORK_OPTIONS = option_group(
    "Operations",
    option(
        "--operations",
        type=name_list("cudakit.gpu.api.collectives:OPERATIONS"),
        metavar="NAME,...",
        help="Operations: all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all, "
        "send-receive.  [default: all]",
    ),
    sizes_option("Bytes of the largest buffer of an operation"),
    option(
        "--dtype",
        "dtypes",
        type=name_list(("fp64", "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int32")),
        metavar="NAME,...",
        help="Data types: fp64, fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8, int32.  [default: fp32]",
    ),
    option(
        "--places",
        type=name_list("cudakit.bench.workloads.nccl:PLACES"),
        metavar="NAME,...",
        help="Buffers: out-of-place (separate send and receive buffers), in-place (one buffer; "
        "not for all-to-all and send-receive).  [default: both]",
    ),
    option(
        "--vs",
        "baselines",
        type=name_list("cudakit.bench.workloads.nccl:COLLECTIVE_BASELINES"),
        metavar="NAME",
        help="Baseline: torch, which is torch.distributed with its NCCL backend. Samples are interleaved.",
    ),
)
_METHOD_OPTIONS = option_group(
    "Method",
    mode_option("batch"),
    option("--graph", is_flag=True, help="The same as --mode graph."),
    option(
        "--cache",
        type=click.Choice(["rotate", "hot"]),
        metavar="STATE",
        help="L2 state before each sample: rotate (cycle through buffers) or hot (operands cached).  "
        "[default: hot]",
    ),
    gpu_option,
)
_RANK_OPTIONS = option_group(
    "Ranks",
    option(
        "--ranks",
        type=click.IntRange(min=1, max=64),
        metavar="N",
        help="Number of ranks of a single process, one per GPU. Simulated GPUs can have several "
        "ranks each.  [default: all visible GPUs]",
    ),
    option(
        "--rendezvous",
        type=FILE,
        metavar="HOST:PORT|FILE",
        default="",
        help="Address at which rank 0 waits for the other processes, or a file on all hosts to which "
        "rank 0 writes its address.  [default: MASTER_ADDR:MASTER_PORT, or the first Slurm node]",
    ),
    option(
        "--rank-timeout",
        type=Seconds(min=0, min_open=True),
        metavar="SEC",
        default=30.0,
        help="Stop if a rank does not connect or answer within SEC seconds.  [default: 30]",
    ),
)


@click.command(
    cls=Command,
    help_by_title=HELP_BY_TITLE,
    short_help="Bandwidth and latency of NCCL's collective operations.",
)
@partial(with_options, (*_WORK_OPTIONS, *_METHOD_OPTIONS, *_RANK_OPTIONS))
@effort_options
@output_options(FORMATS)
def nccl(
    *,
    gpu: str,
    effort: Effort,
    output: OutputOptions,
    ranks: int | None,
    rendezvous: str,
    rank_timeout: float,
    graph: bool,
    **options: Any,
) -> int:
    """Measure collective operations between all visible GPUs, or between processes.

    The algorithm bandwidth (algbw) and the bus bandwidth (busbw) are those of nccl-tests; the bus bandwidth
    is compared with the links of a GPU. The time of a sample is that of the slowest rank. All received values
    are verified. The default sizes are 1 KiB to 1 GiB, and with --gpu sim 1 KiB to 256 KiB. Sizes are
    rounded so that the part of each rank is a multiple of 16 bytes; a part of less than
    16 bytes is a multiple of 4 bytes.

    A single process uses all visible GPUs; --gpu sim simulates two. Processes of torchrun, srun or mpirun are
    one rank each; only rank 0 prints and writes files. If a rank ends early, the others stop within seconds
    and the completed cases are kept.

    \b
    cudakit bench nccl
    cudakit bench nccl --operations all-reduce --sizes 1KiB..1GiB:4 -o nccl.html
    cudakit bench nccl --graph --dtype bf16 --vs torch
    torchrun --nproc-per-node 8 --no-python cudakit bench nccl
    """
    from cudakit.bench.collectives.launch import detect_launch

    if graph and options["mode"] not in (None, "graph"):
        raise click.UsageError(f"--graph and --mode {options['mode']} exclude each other")
    spec = _make_spec(options | ({"mode": "graph"} if graph else {}), effort)
    gpu = _SIMULATED_MACHINE if gpu == "sim" else gpu
    launch = detect_launch(os.environ)
    if launch is None:
        if rendezvous:
            raise UsageError(
                "--rendezvous needs a process of torchrun, srun or mpirun, but none of them started this one",
                hint="remove --rendezvous: a single process uses all visible GPUs",
            )
        with _local_session(gpu, ranks, rank_timeout) as session:
            return _measure_and_report(spec, gpu, session, output)
    if ranks not in (None, launch.rank_count):
        raise UsageError(
            f"--ranks is {ranks}, but {launch.launcher} started {launch.rank_count} ranks",
            hint="remove --ranks",
        )
    if launch.rank:
        return _serve_rank_0(spec, gpu, launch, rendezvous, rank_timeout)
    with _process_session(spec, gpu, launch, rendezvous, rank_timeout) as session:
        return _measure_and_report(spec, gpu, session, output)


def _make_spec(options: dict[str, Any], effort: Effort) -> NcclSpec:
    from cudakit.bench.workloads.nccl import NcclSpec

    return NcclSpec(**passed_options(**options), **effort.arguments(NcclSpec))


@dataclass(frozen=True, slots=True)
class _Session:
    """The group of ranks, and the facts about the ranks that rank 0 reports."""

    group: RankGroup
    machine: Machine
    run_context: RunContext
    variables: tuple[dict[str, str], ...]  # Environment variables NCCL_* of each rank.
    ordinal: int = 0  # CUDA index of the device of rank 0.
    host: str = _THIS_HOST  # Address at which the other ranks reach rank 0.


def _measure_and_report(spec: NcclSpec, gpu: str, session: _Session, output: OutputOptions) -> int:
    """Measure on all ranks, write the report, and return the exit code."""
    from cudakit.bench.collectives.measure import measure_collectives
    from cudakit.gpu.open import open_gpu

    with open_outputs(output) as outputs:
        with (
            closing(open_gpu(gpu, session.ordinal)) as device,
            progress_line(quiet=output.quiet) as show_progress,
            held_interrupts() as deliver_interrupt,
        ):

            def progress(stage: str, fraction: float) -> None:
                show_progress(stage, fraction)
                deliver_interrupt()

            result = measure_collectives(
                spec,
                device,
                session.group,
                progress,
                run_context=session.run_context,
                nvml=session.machine.nvml(links=True),
                host=session.host,
                variables=session.variables,
            )
        outputs.write(report(result))
    return ExitCode.ENVIRONMENT if session.group.failure else exit_code(result)


@contextmanager
def _local_session(
    gpu: str, requested_rank_count: int | None, timeout_s: float
) -> Iterator[_Session]:
    """Yield a group of ranks in threads of this process, one per GPU."""
    from cudakit.bench.collectives.group import LocalChannel, RankGroup, new_answers
    from cudakit.bench.collectives.processes import nccl_variables
    from cudakit.gpu.machine import open_machine

    machine = open_machine(gpu)
    device_count = _count_devices(machine)
    rank_count = requested_rank_count or device_count
    device_openers = [_device_opener(gpu, rank, device_count) for rank in range(rank_count)]
    run_context = _gather_run_context(machine)
    answers = new_answers()
    channels = [
        LocalChannel(open_device, rank, rank_count, answers, f"rank {rank}")
        for rank, open_device in enumerate(device_openers)
    ]
    group = RankGroup(channels, answers, timeout_s)
    with _closing_group(group):
        yield _Session(group, machine, run_context, (nccl_variables(os.environ),))


@contextmanager
def _process_session(
    spec: NcclSpec, gpu: str, launch: Launch, rendezvous: str, timeout_s: float
) -> Iterator[_Session]:
    """Yield a group of ranks: rank 0 in a thread of this process, the others connected by TCP."""
    from cudakit.bench.collectives.group import LocalChannel, RankGroup, new_answers
    from cudakit.bench.collectives.processes import RemoteChannel, check_same_options
    from cudakit.bench.collectives.rendezvous import accept_ranks, reachable_host
    from cudakit.gpu.machine import open_machine

    machine = open_machine(gpu)
    device_count = _count_devices(machine)
    open_device = _device_opener(gpu, launch.local_rank, device_count)
    run_context, rank_0_facts = _gather_run_context(machine), _process_facts(spec, gpu)
    connection_by_rank = accept_ranks(launch, rendezvous, timeout_s)
    answers = new_answers()
    remote_channels = [
        RemoteChannel(connection, rank, answers, rank_facts)
        for rank, (connection, rank_facts) in sorted(connection_by_rank.items())
    ]
    local_channel = LocalChannel(open_device, 0, launch.rank_count, answers, "rank 0")
    group = RankGroup([local_channel, *remote_channels], answers, timeout_s)
    with _closing_group(group):
        facts_of_ranks = [rank_facts for _, (_, rank_facts) in sorted(connection_by_rank.items())]
        for rank, rank_facts in enumerate(facts_of_ranks, start=1):
            check_same_options(rank_0_facts, rank_facts, rank)
        yield _Session(
            group,
            machine,
            run_context,
            tuple(message["variables"] for message in (rank_0_facts, *facts_of_ranks)),
            launch.local_rank % device_count,
            reachable_host(connection for connection, _ in connection_by_rank.values()),
        )


def _gather_run_context(machine: Machine) -> RunContext:
    """Return the run context of this process, before a rank opens its device."""
    from cudakit.gpu.run_context import gather

    arguments = click.get_current_context().find_object(tuple)
    command = ("cudakit", *(arguments or ()))
    return gather(machine, variables=dict(os.environ), command=command)


@contextmanager
def _closing_group(group: RankGroup) -> Iterator[None]:
    """Close a group of ranks at the end of the ``with`` block; an error ends all ranks with its message."""
    from cudakit.errors import CudakitError

    try:
        yield
    except BaseException as error:
        reason = error.message if isinstance(error, CudakitError) else type(error).__name__
        group.fail(f"rank 0 stopped: {reason}")
        raise
    finally:
        group.close()


def _serve_rank_0(
    spec: NcclSpec, gpu: str, launch: Launch, rendezvous: str, timeout_s: float
) -> int:
    """Execute the requests of rank 0 in a process of another rank, and return the exit code."""
    from cudakit.bench.collectives.processes import serve_rank
    from cudakit.gpu.machine import open_machine

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Rank 0 handles Ctrl-C.
    device_count = _count_devices(open_machine(gpu))
    open_device = _device_opener(gpu, launch.local_rank, device_count)
    serve_rank(launch, rendezvous, _process_facts(spec, gpu), open_device, timeout_s)
    return ExitCode.OK


def _process_facts(spec: NcclSpec, gpu: str) -> dict[str, Any]:
    from cudakit.bench.collectives.processes import process_facts

    options = {
        _OPTION_BY_FIELD.get(field.name, f"--{field.name}"): _option_text(getattr(spec, field.name))
        for field in fields(spec)
    }
    return process_facts(version("cudakit"), options | {"--gpu": gpu}, os.environ)


def _option_text(value: object) -> str:
    """Format the value of an option for a message."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "nothing"
    return "the default" if value is None else str(value)


def _count_devices(machine: Machine) -> int:
    """Return the number of CUDA devices. Raises GpuUnavailable if there is none."""
    from cudakit.errors import GpuUnavailable
    from cudakit.units import Unavailable

    cuda = machine.cuda()
    if isinstance(cuda, Unavailable):
        raise GpuUnavailable(cuda.reason)
    if not cuda.devices:
        raise GpuUnavailable("CUDA has no device", hint="cudakit doctor finds the cause")
    return len(cuda.devices)


def _device_opener(gpu: str, local_rank: int, device_count: int) -> Callable[[], Gpu]:
    """Return a function that opens the device of a rank; simulated devices can have several ranks."""
    from cudakit.errors import InputError
    from cudakit.gpu.open import open_gpu

    if local_rank < device_count or gpu.startswith("sim"):
        return partial(open_gpu, gpu, local_rank % device_count)
    if device_count == 1:
        return partial(open_gpu, gpu, 0)  # The launcher gave each process a GPU of its own.
    raise InputError(
        f"there is no GPU for rank {local_rank} of this host: CUDA has {device_count}",
        hint="start one rank per GPU; CUDA_VISIBLE_DEVICES may hide GPUs",
    )
