"""``cudakit bench nccl``: benchmark collective operations between GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from typing import Any

import click

from cudakit.bench.nccl import NcclSpec, measure_collectives
from cudakit.bench.nccl_processes import (
    Launch,
    RemoteChannel,
    accept_ranks,
    check_same_options,
    detect_launch,
    process_facts,
    reachable_host,
    serve_rank,
)
from cudakit.bench.nccl_ranks import Answers, Channel, Rank, RankGroup
from cudakit.cli.bench.measure import FORMATS, exit_code, report
from cudakit.cli.bench.options import EFFORT_OPTIONS, HELP_BY_TITLE, make_spec, spec_options
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
from cudakit.errors import CudakitError, GpuUnavailable, InputError, UsageError
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import Machine
from cudakit.gpu.machine import open_machine
from cudakit.gpu.open import open_gpu
from cudakit.gpu.run_context import gather
from cudakit.units import Unavailable

# What a user reads about fields of NcclSpec that have no option of their own, or one of another name.
_NAME_BY_FIELD = {
    "warmup_s": "--warmup",
    "budget_s": "--budget",
    "rule": "the stopping rule",
    "blocker": "the blocker",
}
# Model of the machine that ``--gpu sim`` simulates: other models have only one GPU.
_SIMULATED_MACHINE = "sim:h200x2"

*_SPEC_OPTIONS, _CACHE_OPTION = spec_options(NcclSpec)
_METHOD_OPTIONS = option_group(
    "Method",
    option("--graph", is_flag=True, help="The same as --mode graph."),
    _CACHE_OPTION,
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
@partial(with_options, (*_SPEC_OPTIONS, *_METHOD_OPTIONS, *_RANK_OPTIONS, *EFFORT_OPTIONS))
@output_options(FORMATS)
def nccl(
    *,
    gpu: str,
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
    if graph and options["mode"] not in (None, "graph"):
        raise click.UsageError(f"--graph and --mode {options['mode']} exclude each other")
    spec = make_spec(NcclSpec, gpu, options | ({"mode": "graph"} if graph else {}))
    gpu = _SIMULATED_MACHINE if gpu == "sim" else gpu
    launch = detect_launch(os.environ)
    if launch is None:
        if rendezvous:
            raise UsageError(
                "--rendezvous needs a process of torchrun, srun or mpirun, but none of them started this one",
                hint="remove --rendezvous: a single process uses all visible GPUs",
            )
    elif ranks not in (None, launch.rank_count):
        raise UsageError(
            f"--ranks is {ranks}, but {launch.launcher} started {launch.rank_count} ranks",
            hint="remove --ranks",
        )
    if launch and launch.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Rank 0 handles Ctrl-C.
        open_device = _device_opener(gpu, launch.local_rank, _count_devices(open_machine(gpu)))
        serve_rank(launch, rendezvous, _process_facts(spec, gpu), open_device, rank_timeout)
        return ExitCode.OK
    return _measure(spec, gpu, launch, rendezvous, ranks, rank_timeout, output)


def _measure(
    spec: NcclSpec,
    gpu: str,
    launch: Launch | None,
    rendezvous: str,
    ranks: int | None,
    timeout_s: float,
    output: OutputOptions,
) -> int:
    """Measure on all ranks, write the report, and return the exit code.

    Without a launch, all ranks are threads of this process, one per GPU. Else rank 0 is one, and the others
    are connected by TCP.
    """
    machine = open_machine(gpu)
    device_count = _count_devices(machine)
    rank_count = launch.rank_count if launch else ranks or device_count
    ordinal = launch.local_rank if launch else 0
    open_devices = [
        _device_opener(gpu, ordinal + rank, device_count)
        for rank in range(1 if launch else rank_count)
    ]
    # Gathered before a rank opens its device.
    arguments = click.get_current_context().find_object(tuple)
    command = ("cudakit", *(arguments or ()))
    run_context = gather(machine, variables=dict(os.environ), command=command)
    own_facts = _process_facts(spec, gpu)
    others = sorted(accept_ranks(launch, rendezvous, timeout_s).items()) if launch else []
    answers = Answers()
    channels: list[Channel] = [
        *(
            Rank(open_device, rank, rank_count, answers.put)
            for rank, open_device in enumerate(open_devices)
        ),
        *(RemoteChannel(connection, rank, answers, facts) for rank, (connection, facts) in others),
    ]
    group = RankGroup(channels, answers, timeout_s)
    with _closing_group(group):
        for rank, (_, facts) in others:
            check_same_options(own_facts, facts, rank)
        with open_outputs(output) as outputs:
            with (
                closing(open_gpu(gpu, ordinal % device_count)) as device,
                progress_line(quiet=output.quiet) as show_progress,
                held_interrupts() as deliver_interrupt,
            ):

                def progress(stage: str, fraction: float) -> None:
                    show_progress(stage, fraction)
                    deliver_interrupt()

                result = measure_collectives(
                    spec,
                    device,
                    group,
                    progress,
                    run_context=run_context,
                    nvml=machine.nvml(links=True),
                    host=reachable_host(connection for _, (connection, _) in others),
                    variables=[
                        own_facts["variables"],
                        *(facts["variables"] for _, (_, facts) in others),
                    ],
                )
            outputs.write(report(result))
    return ExitCode.ENVIRONMENT if group.failure else exit_code(result)


@contextmanager
def _closing_group(group: RankGroup) -> Iterator[None]:
    """Close a group of ranks at the end of the ``with`` block; an error ends all ranks with its message."""
    try:
        yield
    except BaseException as error:
        reason = error.message if isinstance(error, CudakitError) else type(error).__name__
        group.fail(f"rank 0 stopped: {reason}")
        raise
    finally:
        group.close()


def _process_facts(spec: NcclSpec, gpu: str) -> dict[str, Any]:
    """Return the facts of this process, with all options as texts for messages."""
    names = _NAME_BY_FIELD | {name: option.name for name, option in NcclSpec.options()}
    texts = {"--gpu": gpu}
    for name in (field.name for field in fields(spec)):
        value = getattr(spec, name)
        if isinstance(value, tuple):
            text = ",".join(map(str, value)) or "nothing"
        else:
            text = "the default" if value is None else str(value)
        texts[names.get(name, f"--{name}")] = text
    return process_facts(version("cudakit"), texts, os.environ)


def _count_devices(machine: Machine) -> int:
    """Return the number of CUDA devices. Raises GpuUnavailable if there is none."""
    cuda = machine.cuda()
    if isinstance(cuda, Unavailable):
        raise GpuUnavailable(cuda.reason)
    if not cuda.devices:
        raise GpuUnavailable("CUDA has no device", hint="cudakit doctor finds the cause")
    return len(cuda.devices)


def _device_opener(gpu: str, local_rank: int, device_count: int) -> Callable[[], Gpu]:
    """Return a function that opens the device of a rank; simulated devices can have several ranks."""
    if local_rank < device_count or gpu.startswith("sim"):
        return partial(open_gpu, gpu, local_rank % device_count)
    if device_count == 1:
        return partial(open_gpu, gpu, 0)  # The launcher gave each process a GPU of its own.
    raise InputError(
        f"there is no GPU for rank {local_rank} of this host: CUDA has {device_count}",
        hint="start one rank per GPU; CUDA_VISIBLE_DEVICES may hide GPUs",
    )
