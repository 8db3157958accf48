"""The parsed options of ``cudakit devices``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click

from cudakit.cli.options import Value, byte_size, option, option_group, percent, with_options
from cudakit.cli.output import OutputOptions, Target


@dataclass(frozen=True, slots=True)
class View:
    """The devices and fields to show."""

    ids: tuple[str, ...]
    names: tuple[str, ...]  # names of fields; empty for the full report
    long: bool
    processes: bool
    topology: bool


def view_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a view to a command, which receives it as the keyword ``view``.

    Apply this decorator below ``output_options``: ``--format`` selects the format on the terminal.
    """

    @functools.wraps(command)
    def call_with_options(
        *, output: OutputOptions, output_format: str | None, **other_options: Any
    ) -> Any:
        if output_format and not other_options["names"]:
            raise click.UsageError("--format needs --fields; --json gives everything")
        if output.json and output_format not in (None, "json"):
            raise click.UsageError(f"--json and --format {output_format} exclude each other")
        if output_format == "csv":
            output = replace(output, targets=(*output.targets, Target("-", "csv")))
        values = {
            name: other_options.pop(name)
            for name in ("ids", "names", "long", "processes", "topology")
        }
        output = replace(output, json=output.json or output_format == "json")
        return command(view=View(**values), output=output, **other_options)

    return with_options(_VIEW_OPTIONS, call_with_options)


def select_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--select`` and its limits to a command, which receives the keyword ``spec``, or None."""

    @functools.wraps(command)
    def call_with_options(
        *,
        select: bool,
        count: int | None,
        min_free_mem: int | None,
        max_util: float | None,
        **other_options: Any,
    ) -> Any:
        if select:
            from cudakit.devices.select import SelectSpec

            max_percent = None if max_util is None else max_util * 100
            return command(spec=SelectSpec(count or 1, min_free_mem, max_percent), **other_options)
        if any(limit is not None for limit in (count, min_free_mem, max_util)):
            raise click.UsageError("--count, --min-free-mem and --max-util need --select")
        return command(spec=None, **other_options)

    return with_options(_SELECT_OPTIONS, call_with_options)


def seconds(text: str) -> float:
    """Parse the value of ``--watch`` as a number of seconds; used as ``type=seconds``."""
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
