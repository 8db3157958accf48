"""What ``cudakit devices`` writes: once, or repeatedly with ``--watch``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import click

from cudakit.cli.devices.options import View
from cudakit.cli.output import Output, is_capable_terminal
from cudakit.core.devices.fields import FieldInfo, FieldsList, registry
from cudakit.core.devices.present.overview import FIELDS
from cudakit.core.devices.query import open_query
from cudakit.core.devices.result import DevicesResult, FieldsResult
from cudakit.core.devices.select import SelectSpec, chosen, label, select
from cudakit.document import Document
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api.facts import Machine


def fields(target: Output, view: View) -> None:
    """List the fields that there are."""
    from cudakit.core.devices.present.fields import listing

    known = tuple(registry().values())
    target.write(_json(FieldsList(known)) if view.form == "json" else _page(listing(known), target))


def selection(machine: Machine, target: Output, view: View, spec: SelectSpec) -> None:
    """Print a value for CUDA_VISIBLE_DEVICES."""
    result = open_query(machine).read()
    selected = select(result, chosen(result, view.ids), spec)
    if view.form == "json":
        target.write(_json(selected))
    else:
        _warn_simulated(machine)
        target.write(f"{selected.visible_devices}\n")


def once(machine: Machine, writer: Writer) -> None:
    """Show the devices as they are now."""
    view = writer.view
    result = open_query(machine).read(
        activity=writer.counts_activity, processes=view.processes, topology=view.topology
    )
    if view.form == "csv":
        _warn_simulated(machine)
    writer.target.write(writer.text(result))


def again_and_again(machine: Machine, writer: Writer, seconds: float) -> None:
    """Show what moves until Ctrl-C. Raises EnvironmentUnusable where a device is lost."""
    query, view = open_query(machine), writer.view
    activity = writer.counts_activity
    redraw = Redraw(writer.target)
    try:
        for number in ticks(seconds, twice=activity):
            result = query.read(
                names=view.names or FIELDS, activity=activity, processes=view.processes
            )
            # A first look only starts the counters.
            if number or not activity:
                redraw.show(writer.text(result, first=number <= activity))
            _refuse_lost(result)
    except KeyboardInterrupt:
        return  # the way to end it, and no failure


def _warn_simulated(machine: Machine) -> None:
    """Say it where the output has no place for it."""
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
    """Writes results in the form that a view asks for."""

    target: Output
    view: View
    wanted: tuple[FieldInfo, ...]  # none for a report
    watching: bool = False

    @property
    def counts_activity(self) -> bool:
        """Whether what is shown includes what GPUs did since the last look."""
        if self.wanted:
            return any(field.kind == "activity" for field in self.wanted)
        return self.watching

    def text(self, result: DevicesResult, *, first: bool = True) -> str:
        """Write a result; rows of fields have a header above the first only."""
        shown = replace(result, devices=chosen(result, self.view.ids))
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


# --- drawing again ---------------------------------------------------------------------------------


_TO_END = "\x1b[J"
_HOME = "\x1b[H"
# Between the first two looks at counters, which say nothing alone.
_FIRST_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class Redraw:
    """Shows a text in the place of the one before."""

    output: Output
    _above: int = 0  # lines that stand there

    def show(self, text: str) -> None:
        """Replace what was shown last; a pipe or a file gets one text after another."""
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
        # What has scrolled out of sight cannot be written over; a height of 0 is unknown.
        hidden = 0 < height <= self._above
        return (_HOME if hidden else f"\x1b[{self._above}F") + _TO_END


def ticks(seconds: float, *, twice: bool) -> Iterator[int]:
    """Count looks, one every so many seconds; ``twice``, the first is followed at once by another."""
    yield 0
    if twice:
        time.sleep(min(_FIRST_LOOK_SECONDS, seconds))
        yield 1
    due, number = time.monotonic(), 2
    while True:
        now = time.monotonic()
        # What comes late is not made up for.
        due = max(due + seconds, now)
        time.sleep(due - now)
        yield number
        number += 1
