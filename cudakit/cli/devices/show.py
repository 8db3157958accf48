"""What ``cudakit devices`` writes: once, or repeatedly with ``--watch``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import click

from cudakit.cli.devices.options import View
from cudakit.cli.output import Output, is_capable_terminal
from cudakit.core.devices.fields import FieldsList, registry
from cudakit.core.devices.present import FIELDS
from cudakit.core.devices.query import open_query
from cudakit.core.devices.result import DevicesResult, FieldsResult
from cudakit.core.devices.select import SelectSpec, filter_devices, label, select
from cudakit.document import Document
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api.facts import Machine
from cudakit.gpu.api.fields import FieldInfo


def list_fields(target: Output, view: View) -> None:
    """Write the list of all fields."""
    from cudakit.core.devices.present.fields import listing

    known = tuple(registry().values())
    target.answer(FieldsList(known), lambda: listing(known), as_json=view.form == "json")


def print_selection(machine: Machine, target: Output, view: View, spec: SelectSpec) -> None:
    """Write a value for CUDA_VISIBLE_DEVICES."""
    result = open_query(machine).read()
    selected = select(result, filter_devices(result, view.ids), spec)
    if view.form == "json":
        target.write(_json(selected))
    else:
        _warn_simulated(machine)
        target.write(f"{selected.visible_devices}\n")


def show_once(machine: Machine, writer: Writer) -> None:
    """Write the current state of the devices."""
    view = writer.view
    result = open_query(machine).read(
        activity=writer.counts_activity, processes=view.processes, topology=view.topology
    )
    if view.form == "csv":
        _warn_simulated(machine)
    writer.target.write(writer.text(result))


def watch_devices(machine: Machine, writer: Writer, seconds: float) -> None:
    """Write the state repeatedly until Ctrl-C. Raises EnvironmentUnusable if a device is lost."""
    query, view = open_query(machine), writer.view
    activity = writer.counts_activity
    redraw = Redraw(writer.target)
    try:
        for number in ticks(seconds, twice=activity):
            result = query.read(
                names=view.names or FIELDS, activity=activity, processes=view.processes
            )
            # The first read only starts the counters.
            if number or not activity:
                redraw.show(writer.text(result, first=number <= activity))
            _refuse_lost(result)
    except KeyboardInterrupt:
        return  # Ctrl-C is the way to end it


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


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes results in the format of a view."""

    target: Output
    view: View
    wanted: tuple[FieldInfo, ...]  # none for a report
    watching: bool = False

    @property
    def counts_activity(self) -> bool:
        """Whether the output includes activity since the last read."""
        if self.wanted:
            return any(field.kind == "activity" for field in self.wanted)
        return self.watching

    def text(self, result: DevicesResult, *, first: bool = True) -> str:
        """Return a result as text; CSV has a header with the ``first`` only."""
        shown = replace(result, devices=filter_devices(result, self.view.ids))
        if self.wanted:
            return self._fields(shown, header=first)
        if self.view.form == "json":
            return self._json(shown)
        from cudakit.core.devices.present import report

        page = report(shown, long=self.view.long, activity=self.watching)
        return _page(page, self.target)

    def _fields(self, result: DevicesResult, *, header: bool) -> str:
        from cudakit.core.devices.present.fields import columns, table

        if self.view.form == "table":
            return _page(table(self.wanted, result), self.target)
        if self.view.form == "json":
            return self._json(_chosen_fields(result, self.wanted))
        from cudakit.render import csv

        text = "".join(csv.render(columns(self.wanted, result)))
        return text if header else text.partition("\r\n")[2]

    def _json(self, result: DevicesResult | FieldsResult) -> str:
        return _json(result, line=self.watching)


def _chosen_fields(result: DevicesResult, wanted: tuple[FieldInfo, ...]) -> FieldsResult:
    devices = tuple(
        {field.name: device.field(field.name) for field in wanted} for device in result.devices
    )
    return FieldsResult(result.simulated, result.time_ns, devices)


def _json(result: object, *, line: bool = False) -> str:
    from cudakit.render import json

    return json.render_line(result) if line else json.render(result)


def _page(document: Document, target: Output) -> str:
    from cudakit.render import console

    return console.render(document, width=target.width, color=target.color)


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
