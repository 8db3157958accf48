"""``cudakit devices``: list the GPUs with their indices and current state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import (
    Command,
    Value,
    byte_size,
    gpu_option,
    option,
    option_group,
    output_options,
    percent,
    with_options,
)
from cudakit.cli.output import COMMON_FORMATS, OutputOptions, Target, open_outputs, suffixes

_FORMATS = (*COMMON_FORMATS, "csv")
_WATCH_FORMATS = ("json", "txt", "csv")
_SELECT_FORMATS = ("json", "txt")


def _seconds(text: str) -> float:
    """Parse the value of ``--watch`` as a number of seconds."""
    try:
        interval_s = float(text)
    except ValueError:
        interval_s = 0.0
    if not 0.1 <= interval_s < float("inf"):
        raise click.BadParameter(f"{text!r} is not a number of seconds of at least 0.1")
    return interval_s


def _parse_names(text: str) -> tuple[str, ...]:
    field_names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not field_names:
        raise click.BadParameter("name at least one field; --list-fields lists them")
    return field_names


def _parse_utilization(text: str) -> float:
    max_utilization = percent(text)
    if max_utilization > 1:
        raise click.BadParameter(f"{text!r} is more than 100%")
    return max_utilization


def _field_names() -> list[str]:
    from cudakit.devices.result import field_registry

    return list(field_registry())


_VIEW_OPTIONS = option_group(
    "What to show",
    option(
        "-l",
        "--long",
        is_flag=True,
        help="Show the architecture, the compute capability, limits, health and all other fields of each "
        "device, except those of activity.",
    ),
    option(
        "-p",
        "--processes",
        is_flag=True,
        help="Show the processes on each device: type, SM utilization, memory, runtime.",
    ),
    option(
        "-t",
        "--topology",
        is_flag=True,
        help="Show how the devices are connected: NVLink, PCIe, peer access.",
    ),
    option(
        "--device",
        "ids",
        type=Value(("cuda:0", "nvml:0")),
        multiple=True,
        metavar="DEVICE",
        help="Show only this device: 0 or cuda:0, nvml:1, a UUID prefix or a PCI address. Repeatable.",
    ),
    option(
        "--fields",
        "names",
        type=Value(_field_names, _parse_names, is_list=True),
        default=(),
        metavar="NAME,...",
        help="Show only these fields; --list-fields lists them.",
    ),
    option(
        "--format",
        "output_format",
        type=click.Choice(("table", "csv", "json")),
        help="With --fields: output format on the terminal.  [default: table]",
    ),
    option("--list-fields", is_flag=True, help="List all fields with their units and meaning."),
    option(
        "--watch",
        type=Value((), _seconds),
        metavar="SEC",
        help="Update every SEC seconds, until q or Ctrl-C. JSON has one line per update.",
    ),
    gpu_option,
)
_SELECT_OPTIONS = option_group(
    "Select devices for CUDA_VISIBLE_DEVICES",
    option(
        "--select",
        is_flag=True,
        help="Print a value for CUDA_VISIBLE_DEVICES: the devices with the most free memory.",
    ),
    option(
        "--count",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --select: number of devices, at least 1.  [default: 1]",
    ),
    option(
        "--min-free-mem",
        type=byte_size,
        metavar="SIZE",
        help="With --select: minimum free memory, for example 10GiB.",
    ),
    option(
        "--max-util",
        type=_parse_utilization,
        metavar="RATIO",
        help="With --select: maximum utilization, for example 10%.",
    ),
)


@click.command(cls=Command)
@output_options(
    _FORMATS,
    format_limits=f"With --watch: {suffixes(_WATCH_FORMATS)}. With --select: {suffixes(_SELECT_FORMATS)}.",
)
@partial(with_options, (*_VIEW_OPTIONS, *_SELECT_OPTIONS))
def devices(
    *,
    output: OutputOptions,
    output_format: str | None,
    watch: float | None,
    list_fields: bool,
    gpu: str,
    select: bool,
    count: int | None,
    min_free_mem: int | None,
    max_util: float | None,
    **shown: Any,
) -> int:
    """List GPUs with their CUDA, NVML and PCI indices and current state.

    CUDA, NVML (nvidia-smi) and PCI number devices differently: the report shows all three, and also the
    devices that CUDA_VISIBLE_DEVICES hides. The command changes nothing and creates no CUDA context. With
    --gpu sim, CUDA_VISIBLE_DEVICES is simulated too: its value on this machine has no effect.

    With --watch on a terminal (except with TERM=dumb), the report has bars, a history of one minute, and
    keys: s sorts, / filters by device or process, p shows processes, q quits.

    \b
    cudakit devices --processes --topology
    cudakit devices --watch 1
    cudakit devices --fields name,power_draw_w --format csv
    CUDA_VISIBLE_DEVICES=$(cudakit devices --select) python train.py
    """
    from cudakit.devices.result import fields_by_name
    from cudakit.devices.select import SelectSpec, View

    view = View(**shown)
    if output_format and not view.names:
        raise click.UsageError("--format needs --fields; --json gives everything")
    if output.json and output_format not in (None, "json"):
        raise click.UsageError(f"--json and --format {output_format} exclude each other")
    if output_format == "csv":
        output = replace(output, targets=(*output.targets, Target("-", "csv")))
    output = replace(output, json=output.json or output_format == "json")
    if not select and any(limit is not None for limit in (count, min_free_mem, max_util)):
        raise click.UsageError("--count, --min-free-mem and --max-util need --select")
    if watch and (view.long or view.topology or select):
        raise click.UsageError("--watch cannot be combined with --long, --topology or --select")
    if list_fields and (watch or select or view != View((), (), False, False, False)):
        raise click.UsageError("--list-fields lists all fields; remove the other options")
    refuser = "--select" if select else "--fields" if view.names else ""
    for name in ("long", "processes", "topology"):
        if refuser and getattr(view, name):
            raise click.UsageError(f"--{name} has no effect with {refuser}")
    if select and view.names:
        raise click.UsageError("--fields has no effect with --select")
    selected_fields = fields_by_name(view.names)
    formats = _WATCH_FORMATS if watch else _SELECT_FORMATS if select else None
    with open_outputs(output, formats) as outputs:
        from cudakit.gpu.machine import open_machine

        machine = None if list_fields else open_machine(gpu)
        # This slow import runs while the child process queries the driver.
        from cudakit.cli.devices import show

        if machine is None:
            show.list_fields(outputs)
        elif select:
            max_percent = None if max_util is None else max_util * 100
            spec = SelectSpec(count or 1, min_free_mem, max_percent)
            show.print_selection(machine, outputs, view, spec)
        elif watch:
            writers = [
                show.Writer(
                    target,
                    output_format,
                    view,
                    selected_fields,
                    is_brief=output.quiet and not output.targets,
                )
                for output_format, target in outputs.streams()
            ]
            with show.keyboard() as wait_for_keys:
                show.watch_devices(machine, writers, watch, wait_for_keys)
            outputs.close()
        else:
            show.show_once(machine, outputs, view, selected_fields)
    return ExitCode.OK
