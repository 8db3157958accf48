"""The output of ``cudakit devices``: once, or repeatedly with ``--watch``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import click

from cudakit.cli.devices.options import View
from cudakit.cli.output import Output, is_capable_terminal
from cudakit.cli.report import Outputs, Report
from cudakit.core.devices.fields import FieldsList, registry
from cudakit.core.devices.present import FIELDS
from cudakit.core.devices.query import open_query
from cudakit.core.devices.result import DevicesResult, FieldsResult
from cudakit.core.devices.select import SelectSpec, filter_devices, label, select
from cudakit.document import Document
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api.facts import Machine
from cudakit.gpu.api.fields import FieldInfo


def list_fields(outputs: Outputs) -> None:
    """Write the list of all fields."""
    from cudakit.core.devices.present.fields import listing

    known = tuple(registry().values())
    outputs.write(Report(result=FieldsList(known), document=lambda: listing(known)))


def print_selection(machine: Machine, outputs: Outputs, view: View, spec: SelectSpec) -> None:
    """Write a value for CUDA_VISIBLE_DEVICES."""
    result = open_query(machine).read()
    selected = select(result, filter_devices(result, view.ids), spec)
    _warn_simulated(machine)
    value = selected.visible_devices
    outputs.write(
        Report(
            result=selected,
            document=lambda: Document(value, ()),
            exports={"txt": lambda: f"{value}\n"},
        )
    )


def show_once(
    machine: Machine, outputs: Outputs, view: View, wanted: tuple[FieldInfo, ...]
) -> None:
    """Write the current state of the devices."""
    result = open_query(machine).read(
        activity=counts_activity(wanted), processes=view.processes, topology=view.topology
    )
    shown = replace(result, devices=filter_devices(result, view.ids))
    outputs.write(_report(shown, view, wanted, warn=lambda: _warn_simulated(machine)))


def watch_devices(machine: Machine, writers: Sequence[Writer], seconds: float) -> None:
    """Write the state repeatedly until Ctrl-C. Raises EnvironmentUnusable if a device is lost."""
    query, (first, *_) = open_query(machine), writers
    view, activity = first.view, counts_activity(first.wanted, watching=True)
    try:
        for number in ticks(seconds, twice=activity):
            result = query.read(
                names=view.names or FIELDS, activity=activity, processes=view.processes
            )
            # The first read only starts the counters.
            if number or not activity:
                for writer in writers:
                    writer.show(result, first=number <= activity)
            _refuse_lost(result)
    except KeyboardInterrupt:
        return  # Ctrl-C is the way to end it


def counts_activity(wanted: tuple[FieldInfo, ...], *, watching: bool = False) -> bool:
    """Return whether the output includes activity since the last read."""
    if wanted:
        return any(each.kind == "activity" for each in wanted)
    return watching


def _warn_simulated(machine: Machine) -> None:
    """Warn on stderr: this output cannot contain the warning."""
    if machine.simulated:
        click.echo("these GPUs are simulated", err=True)


def _refuse_lost(result: DevicesResult) -> None:
    lost = [device for device in result.devices if device.lost]
    if lost:
        raise EnvironmentUnusable(
            f"lost: {', '.join(map(label, lost))}",
            hint="the kernel log says why (dmesg, lines with NVRM and Xid); cudakit doctor reads it",
        )


def _report(
    result: DevicesResult,
    view: View,
    wanted: tuple[FieldInfo, ...],
    *,
    watching: bool = False,
    warn: Callable[[], None] = lambda: None,
) -> Report:
    """Return the report of the devices, or of the wanted fields."""
    from cudakit.core.devices.present import report
    from cudakit.core.devices.present.fields import table

    def csv() -> Iterator[str]:
        from cudakit.core.devices.present.fields import columns
        from cudakit.render import csv

        warn()
        return csv.render(columns(wanted or tuple(registry().values()), result))

    return Report(
        result=_chosen_fields(result, wanted) if wanted else result,
        document=lambda: (
            table(wanted, result) if wanted else report(result, long=view.long, activity=watching)
        ),
        exports={"csv": csv},
    )


@dataclass(slots=True)
class Writer:
    """Writes results repeatedly to one place, in one format."""

    target: Output
    form: str
    view: View
    wanted: tuple[FieldInfo, ...]  # none for a report
    _redraw: Redraw = field(init=False)

    def __post_init__(self) -> None:
        self._redraw = Redraw(self.target)

    def show(self, result: DevicesResult, *, first: bool = True) -> None:
        """Write a result; on a terminal it replaces the last one."""
        self._redraw.show(self.text(result, first=first))

    def text(self, result: DevicesResult, *, first: bool = True) -> str:
        """Return a result as text; CSV has a header with the ``first`` only."""
        shown = replace(result, devices=filter_devices(result, self.view.ids))
        report = _report(shown, self.view, self.wanted, watching=True)
        if self.form == "json":
            from cudakit.render import json

            return json.render_line(report.result)
        text = "".join(report.text(self.form, self.target))
        is_headless = self.form == "csv" and not first
        return text.partition("\r\n")[2] if is_headless else text


def _chosen_fields(result: DevicesResult, wanted: tuple[FieldInfo, ...]) -> FieldsResult:
    devices = tuple(
        {each.name: device.field(each.name) for each in wanted} for device in result.devices
    )
    return FieldsResult(result.simulated, result.time_ns, devices)


# --- redrawing -------------------------------------------------------------------------------------


_TO_END = "\x1b[J"
_HOME = "\x1b[H"
# Between the first two reads of the counters: activity is a difference.
_FIRST_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class Redraw:
    """Replaces the text shown last on a terminal."""

    output: Output
    _above: int = 0  # lines of the last text

    def show(self, text: str) -> None:
        """Replace the text shown last; append to a pipe or a file."""
        if is_capable_terminal(self.output.stream):
            self.output.write(self._back() + text)
            self._above = text.count("\n")
        else:
            self.output.write(text)
        self.output.stream.flush()

    def _back(self) -> str:
        if not self._above:
            return ""
        height = os.get_terminal_size(self.output.stream.fileno()).lines
        # Lines that have scrolled away cannot be overwritten; a height of 0 is unknown.
        hidden = 0 < height <= self._above
        return (_HOME if hidden else f"\x1b[{self._above}F") + _TO_END


def ticks(seconds: float, *, twice: bool) -> Iterator[int]:
    """Yield 0, 1, ... every ``seconds``; ``twice`` yields 1 shortly after 0."""
    yield 0
    if twice:
        time.sleep(min(_FIRST_LOOK_SECONDS, seconds))
        yield 1
    due, number = time.monotonic(), 2
    while True:
        now = time.monotonic()
        # Missed ticks are dropped.
        due = max(due + seconds, now)
        time.sleep(due - now)
        yield number
        number += 1
