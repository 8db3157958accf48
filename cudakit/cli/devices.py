"""``cudakit devices``: which GPU is which, and how each one fares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import OutputOptions, byte_size, gpu_option, output_options, percent
from cudakit.cli.output import Output, open_output
from cudakit.cli.watch import Redraw, ticks
from cudakit.errors import EnvironmentUnusable

if TYPE_CHECKING:
    from cudakit.core.devices.fields import FieldInfo
    from cudakit.core.devices.query import Query
    from cudakit.core.devices.result import Device, DevicesResult
    from cudakit.core.devices.select import SelectSpec
    from cudakit.document import Document


@dataclass(frozen=True, slots=True)
class _View:
    """What is to be seen of which devices, and in which form."""

    ids: tuple[str, ...]
    names: tuple[str, ...]  # of fields; none for a report
    form: str  # table, csv or json
    long: bool
    processes: bool
    topology: bool


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds < float("inf"):
        raise click.BadParameter(f"{text!r} is not a number of seconds, 0.1 or more")
    return seconds


def _view_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that become a _View."""

    @functools.wraps(command)
    def collecting(
        *, ids: Any, fields: Any, form: Any, output: Any, long: Any, processes: Any, topology: Any,
        **rest: Any
    ) -> Any:
        if form and not fields:
            raise click.UsageError("--format needs --fields; --json gives everything")
        if output.json and form not in (None, "json"):
            raise click.UsageError(f"--json and --format {form} are two forms")
        chosen = form or ("json" if output.json else "table")
        view = _View(ids, fields, chosen, long, processes, topology)
        return command(view=view, output=output, **rest)

    decorated: Callable[..., Any] = collecting
    for option in (
        click.option("--format", "form", type=click.Choice(("table", "csv", "json")), help="Form of --fields (table)."),
        click.option("--fields", type=_names, default=(), metavar="A,B,...", help="Show these fields only."),
        click.option("--id", "ids", multiple=True, metavar="DEVICE", help="One device only: cuda:0, nvml:1, a UUID or its beginning, a PCI address; repeatable."),
        click.option("-t", "--topology", is_flag=True, help="Show how the devices reach each other."),
        click.option("-p", "--processes", is_flag=True, help="Show who uses each device."),
        click.option("-l", "--long", is_flag=True, help="Show all that is known of each device."),
    ):
        decorated = option(decorated)
    return decorated


def _select_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that become a SelectSpec; without ``--select``, it is None."""

    @functools.wraps(command)
    def collecting(*, select: bool, count: Any, min_free_mem: Any, max_util: Any, **rest: Any) -> Any:
        if not select and (count, min_free_mem, max_util) != (None, None, None):
            raise click.UsageError("--count, --min-free-mem and --max-util need --select")
        from cudakit.core.devices.select import SelectSpec

        most = None if max_util is None else max_util * 100
        spec = SelectSpec(count or 1, min_free_mem, most) if select else None
        return command(spec=spec, **rest)

    decorated: Callable[..., Any] = collecting
    for option in (
        click.option("--max-util", type=percent, metavar="P%", help="With --select: busy at most so much."),
        click.option("--min-free-mem", type=byte_size, metavar="SIZE", help="With --select: with so much free memory at least, as 10GiB."),
        click.option("--count", type=click.IntRange(min=1), metavar="N", help="With --select: so many (1)."),
        click.option("--select", is_flag=True, help="Print a value for CUDA_VISIBLE_DEVICES: devices with most free memory."),
    ):
        decorated = option(decorated)
    return decorated


@click.command()
@click.option("--list-fields", is_flag=True, help="List all fields and what they mean.")
@click.option("--watch", type=_seconds, metavar="SEC", help="Look again every SEC seconds.")
@_select_options
@gpu_option
@output_options
@_view_options
def devices(
    *,
    view: _View,
    list_fields: bool,
    watch: float | None,
    spec: SelectSpec | None,
    gpu: str,
    output: OutputOptions,
) -> int:
    """Show which GPU is which, and how each one fares.

    CUDA, NVML (nvidia-smi) and PCI number devices differently: all three stand side by side, and
    devices that CUDA_VISIBLE_DEVICES hides are there too. Nothing is changed, no context is made.

    \b
    cudakit devices --processes --topology
    cudakit devices --watch 1
    cudakit devices --fields name,power_draw_w --format csv
    CUDA_VISIBLE_DEVICES=$(cudakit devices --select --min-free-mem 10GiB) python train.py
    """
    if watch and (view.long or view.topology or spec):
        raise click.UsageError("--watch shows what moves: not --long, --topology or --select")
    with open_output(output.path, force=output.force) as target:
        if list_fields:
            _list_fields(target, view)
        elif spec:
            _select(_open(gpu), target, view, spec)
        elif watch:
            _watch(_open(gpu), target, view, watch)
        else:
            _show(_open(gpu), target, view)
    return ExitCode.OK


def _open(gpu: str) -> Query:
    from cudakit.gpu.machine import open_machine

    # The driver is being asked while this process imports the rest.
    machine = open_machine(gpu)
    from cudakit.core.devices.query import open_query

    return open_query(machine)


def _list_fields(target: Output, view: _View) -> None:
    from cudakit.core.devices.fields import FieldsList, registry
    from cudakit.core.devices.present.rows import listing

    fields = tuple(registry().values())
    as_json = view.form == "json"
    target.write(_json(FieldsList(fields)) if as_json else _page(listing(fields), target))


def _select(query: Query, target: Output, view: _View, spec: SelectSpec) -> None:
    from cudakit.core.devices.select import chosen, select

    result = query.read()
    selected = select(result, chosen(result, view.ids), spec)
    value = f"{selected.visible_devices}\n"
    target.write(_json(selected) if view.form == "json" else value)


def _show(query: Query, target: Output, view: _View) -> None:
    fields = _fields(view)
    result = query.read(
        activity=_moves(fields), processes=view.processes, topology=view.topology
    )
    target.write(_text(result, view, fields, target))


def _watch(query: Query, target: Output, view: _View, seconds: float) -> None:
    """Show what moves again and again, until Ctrl-C; raise where a device is lost."""
    from cudakit.core.devices.present.overview import FIELDS

    fields = _fields(view)
    names = tuple(field.name for field in fields) or FIELDS
    activity = _moves(fields) or not fields
    redraw = Redraw(target)
    try:
        for first in ticks(seconds, at_once=activity):
            result = query.read(names=names, activity=activity, processes=view.processes)
            if not first or not activity:
                redraw.show(_text(result, view, fields, target, watching=True))
            _refuse_lost(result)
    except KeyboardInterrupt:
        return
