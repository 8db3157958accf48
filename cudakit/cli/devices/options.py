"""The options of ``cudakit devices``, parsed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.options import OutputOptions, byte_size, percent, with_options

if TYPE_CHECKING:
    from cudakit.core.devices.select import SelectSpec


@dataclass(frozen=True, slots=True)
class View:
    """The devices and fields to show, and the output format."""

    ids: tuple[str, ...]
    names: tuple[str, ...]  # of fields; none for a report
    form: str  # table, csv or json
    long: bool
    processes: bool
    topology: bool


def view_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a view to a command, which receives it as the keyword ``view``.

    Apply below ``output_options``, whose ``--json`` is a format as well.
    """

    @functools.wraps(command)
    def collecting(*, output: OutputOptions, form: str | None, **rest: Any) -> Any:
        if form and not rest["names"]:
            raise click.UsageError("--format needs --fields; --json gives everything")
        if output.json and form not in (None, "json"):
            raise click.UsageError(f"--json and --format {form} are two forms")
        parts = {name: rest.pop(name) for name in ("ids", "names", "long", "processes", "topology")}
        view = View(form=form or ("json" if output.json else "table"), **parts)
        return command(view=view, output=output, **rest)

    return with_options(_VIEW, collecting)


def select_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--select`` and its limits to a command, which receives them as the keyword ``spec``, or None."""

    @functools.wraps(command)
    def collecting(
        *,
        select: bool,
        count: int | None,
        min_free_mem: int | None,
        max_util: float | None,
        **rest: Any,
    ) -> Any:
        if select:
            return command(spec=_spec(count, min_free_mem, max_util), **rest)
        if any(limit is not None for limit in (count, min_free_mem, max_util)):
            raise click.UsageError("--count, --min-free-mem and --max-util need --select")
        return command(spec=None, **rest)

    return with_options(_SELECT, collecting)


def seconds(text: str) -> float:
    """Parse the value of ``--watch``: ``type=seconds``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.1 <= number < float("inf"):
        raise click.BadParameter(f"{text!r} is not a number of seconds, 0.1 or more")
    return number


def _spec(count: int | None, min_free_bytes: int | None, max_ratio: float | None) -> SelectSpec:
    from cudakit.core.devices.select import SelectSpec

    return SelectSpec(count or 1, min_free_bytes, None if max_ratio is None else max_ratio * 100)


def _names(text: str | tuple[str, ...]) -> tuple[str, ...]:
    # Click also converts the default, which is a tuple already.
    parts = text.split(",") if isinstance(text, str) else text
    return tuple(filter(None, (part.strip() for part in parts)))


_VIEW = (
    click.option("-l", "--long", is_flag=True, help="Show all that is known of each device."),
    click.option("-p", "--processes", is_flag=True, help="Show who uses each device."),
    click.option("-t", "--topology", is_flag=True, help="Show how the devices reach each other."),
    click.option(
        "--id",
        "ids",
        multiple=True,
        metavar="DEVICE",
        help="One device only: cuda:0, nvml:1, a UUID or its beginning, a PCI address; repeatable.",
    ),
    click.option(
        "--fields",
        "names",
        type=_names,
        default=(),
        metavar="A,B,...",
        help="Show these fields only; --list-fields lists them.",
    ),
    click.option(
        "--format",
        "form",
        type=click.Choice(("table", "csv", "json")),
        help="The form of --fields; a table if not given.",
    ),
)
_SELECT = (
    click.option(
        "--select",
        is_flag=True,
        help="Print a value for CUDA_VISIBLE_DEVICES: the devices with most free memory.",
    ),
    click.option(
        "--count",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --select: so many devices; 1 if not given.",
    ),
    click.option(
        "--min-free-mem",
        type=byte_size,
        metavar="SIZE",
        help="With --select: with at least so much free memory, for example 10GiB.",
    ),
    click.option(
        "--max-util",
        type=percent,
        metavar="RATIO",
        help="With --select: busy at most so much of the time, for example 10%.",
    ),
)
