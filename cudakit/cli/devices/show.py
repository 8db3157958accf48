"""The output of ``cudakit devices``: written once, or with ``--watch`` repeatedly."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from select import select as wait_until_readable

import click

from cudakit.cli.output import Output, Outputs, Report, is_capable_terminal, terminal_width
from cudakit.devices.query import open_query
from cudakit.devices.report import WATCHED_FIELDS, field_columns, field_list, field_table, report
from cudakit.devices.result import DevicesResult, FieldsList, FieldsResult, field_registry
from cudakit.devices.select import SelectSpec, View, filter_devices, label, select
from cudakit.devices.watch import History, Quit, WatchView, live_report
from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api.facts import FieldInfo, Machine
from cudakit.report.document import Document


def list_fields(outputs: Outputs) -> None:
    """Write the list of all fields."""
    fields = tuple(field_registry().values())
    outputs.write(
        Report(
            result=FieldsList(fields),
            document=lambda: field_list(fields),
            brief_sentences=lambda: [f"{field.name}: {field.description}" for field in fields],
        )
    )


def print_selection(machine: Machine, outputs: Outputs, view: View, spec: SelectSpec) -> None:
    """Write a value for CUDA_VISIBLE_DEVICES."""
    result = open_query(machine).read()
    selected_devices = select(result, filter_devices(result, view.ids), spec)
    _warn_simulated(machine)
    variable_value = selected_devices.visible_devices
    outputs.write(
        Report(
            result=selected_devices,
            document=lambda: Document(variable_value, ()),
            exports={"txt": lambda: f"{variable_value}\n"},
        )
    )


def show_once(
    machine: Machine, outputs: Outputs, view: View, selected_fields: tuple[FieldInfo, ...]
) -> None:
    """Write the current state of the devices."""
    result = open_query(machine).read(
        activity=counts_activity(selected_fields), processes=view.processes, topology=view.topology
    )
    filtered_result = replace(result, devices=filter_devices(result, view.ids))
    # Only CSV does not say that the GPUs are simulated: with a CSV file, the summary on the terminal does.
    if "csv" in outputs.terminal_formats:
        _warn_simulated(machine)
    outputs.write(report_of(filtered_result, view, selected_fields))


def counts_activity(selected_fields: tuple[FieldInfo, ...], *, watching: bool = False) -> bool:
    """Return whether the output includes activity since the last read of the counters."""
    if selected_fields:
        return any(field.kind == "activity" for field in selected_fields)
    return watching


def _warn_simulated(machine: Machine) -> None:
    """Warn on stderr that the GPUs are simulated, because a plain list of fields cannot say so."""
    if machine.simulated:
        click.echo("cudakit: these GPUs and CUDA_VISIBLE_DEVICES are simulated", err=True)


def report_of(
    result: DevicesResult,
    view: View,
    selected_fields: tuple[FieldInfo, ...],
    *,
    watching: bool = False,
) -> Report:
    """Return the report of the devices, or of the selected fields."""
    chosen = FieldsResult(
        result.simulated,
        result.time_ns,
        tuple(
            {field.name: device.field(field.name) for field in selected_fields}
            for device in result.devices
        ),
    )
    return Report(
        result=chosen if selected_fields else result,
        document=lambda: (
            field_table(selected_fields, result)
            if selected_fields
            else report(result, with_all_fields=view.long, with_activity=watching)
        ),
        rows=lambda: field_columns(selected_fields or tuple(field_registry().values()), result),
    )


# --- ``devices --watch``: write the state repeatedly; on a terminal redraw it and read keys --------

# A function that waits until keys are pressed, at most a number of seconds, and returns the keys.
WaitForKeys = Callable[[float], str]
# A function that returns the report on a terminal of a width.
Page = Callable[[DevicesResult, int], Document]


def watch_devices(
    machine: Machine,
    writers: Sequence[Writer],
    seconds: float,
    wait_for_keys: WaitForKeys | None = None,
) -> None:
    """Write the state repeatedly until "q" or Ctrl-C.

    Raises EnvironmentUnusable if a device has fallen off the bus.
    """
    query, (first_writer, *_) = open_query(machine), writers
    includes_activity = counts_activity(first_writer.selected_fields, watching=True)
    session = _Session(
        writers, WatchView(shows_processes=first_writer.view.processes), wait_for_keys
    )
    try:
        for tick_number in ticks(
            seconds, quick_first=includes_activity, wait_for_keys=session.wait
        ):
            result = query.read(
                names=first_writer.view.names or WATCHED_FIELDS,
                activity=includes_activity,
                processes=session.view.needs_processes,
            )
            # The first read only starts the counters.
            if tick_number or not includes_activity:
                session.show(result, is_first=tick_number <= includes_activity)
            if lost_devices := [device for device in result.devices if device.lost]:
                raise EnvironmentUnusable(
                    f"GPU lost: {', '.join(map(label, lost_devices))}",
                    hint="the kernel log has the reason (dmesg, lines with NVRM and Xid); cudakit doctor "
                    "reads it",
                )
    except (KeyboardInterrupt, Quit):
        return


@dataclass(slots=True)
class _Session:
    """The state of ``--watch``: the writers, the view that the keys change, and the last result."""

    writers: Sequence[Writer]
    view: WatchView
    wait_for_keys: WaitForKeys | None
    history: History = field(default_factory=History)
    _last_result: DevicesResult | None = None

    def show(self, result: DevicesResult, *, is_first: bool) -> None:
        self.history.add_samples(result)
        self._last_result = result
        for writer in self.writers:
            writer.show(result, self.page, is_first=is_first)

    def page(self, result: DevicesResult, width: int) -> Document:
        """Return the report on a terminal: with history, bars and keys."""
        has_keys = self.wait_for_keys is not None
        return live_report(result, self.history, self.view, width=width, with_keys=has_keys)

    def wait(self, seconds: float) -> None:
        """Wait, and process each key immediately. Raises Quit for "q" and if the terminal is closed."""
        if self.wait_for_keys is None:
            time.sleep(seconds)
            return
        deadline_s = time.monotonic() + seconds
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            pressed_keys = self.wait_for_keys(remaining_s)
            earlier_view = self.view
            for key in pressed_keys:
                self.view = self.view.press(key)
            if self.view == earlier_view:
                continue
            if self._last_result:
                for writer in self.writers:
                    writer.redraw(self._last_result, self.page)
            if self.view.needs_processes != earlier_view.needs_processes:
                return  # the caller reads the processes at once


@dataclass(slots=True)
class Writer:
    """Writes results repeatedly to one file or to the terminal, in one format."""

    target: Output
    output_format: str
    view: View
    selected_fields: tuple[FieldInfo, ...]  # fields of --fields; empty for the full report
    is_brief: bool = False  # whether a report in text has one line per finding and device
    _lines_above: int = 0  # number of lines of the last text, if it is on a terminal

    def show(self, result: DevicesResult, page: Page, *, is_first: bool) -> None:
        """Write a result; on a terminal it replaces the previous one. ``is_first`` adds the header of CSV."""
        if self._is_live:
            self.redraw(result, page)
        else:
            self._replace_text(self._text(result, is_first=is_first))

    def redraw(self, result: DevicesResult, page: Page) -> None:
        """Rewrite the last report, on a terminal only."""
        if self._is_live:
            # The user may have resized the terminal.
            width = terminal_width(self.target.stream)
            document = page(self._arrange_devices(result), width)
            report = Report(result=result, document=lambda: document)
            self._replace_text("".join(report.text("txt", replace(self.target, width=width))))

    @property
    def _is_live(self) -> bool:
        is_report = self.output_format == "txt" and not self.selected_fields and not self.is_brief
        return is_report and is_capable_terminal(self.target.stream)

    def _arrange_devices(self, result: DevicesResult) -> DevicesResult:
        return replace(result, devices=filter_devices(result, self.view.ids))

    def _text(self, result: DevicesResult, *, is_first: bool) -> str:
        report = report_of(
            self._arrange_devices(result), self.view, self.selected_fields, watching=True
        )
        if self.output_format == "json":
            from cudakit.report import json

            return json.render_line(report.result)
        if self.is_brief and self.output_format == "txt":
            return report.brief_text(self.target, with_rows=True)
        text = "".join(report.text(self.output_format, self.target))
        return text.partition("\r\n")[2] if self.output_format == "csv" and not is_first else text

    def _replace_text(self, text: str) -> None:
        """Replace the last text on a terminal; append to a pipe or a file.

        Brief lines are appended on a terminal too: they may be wider than it, so their height is unknown.
        """
        if is_capable_terminal(self.target.stream) and not self.is_brief:
            if self._lines_above:
                height = os.get_terminal_size(self.target.stream.fileno()).lines
                # Lines that have scrolled away cannot be overwritten. A height of 0 is unknown.
                has_scrolled = 0 < height <= self._lines_above
                cursor = _CURSOR_HOME if has_scrolled else f"\x1b[{self._lines_above}F"
                text = cursor + _CLEAR_TO_END + text
            self.target.write(text)
            self._lines_above = text.count("\n")
        else:
            self.target.write(text)
        self.target.stream.flush()


_CLEAR_TO_END = "\x1b[J"
_CURSOR_HOME = "\x1b[H"


# --- time and keys ---------------------------------------------------------------------------------

# The time between the first two reads of the counters: activity is the difference of two reads.
_FIRST_INTERVAL_SECONDS = 0.2


def ticks(
    seconds: float, *, quick_first: bool, wait_for_keys: Callable[[float], None] = time.sleep
) -> Iterator[int]:
    """Yield 0, 1, ... every ``seconds``; ``quick_first`` yields 1 soon after 0. Missed ticks are dropped."""
    yield 0
    if quick_first:
        wait_for_keys(min(_FIRST_INTERVAL_SECONDS, seconds))
        yield 1
    next_tick_s, tick_number = time.monotonic(), 2
    while True:
        now_s = time.monotonic()
        next_tick_s = max(next_tick_s + seconds, now_s)
        wait_for_keys(next_tick_s - now_s)
        next_tick_s = min(next_tick_s, time.monotonic())  # a key may end the wait early
        yield tick_number
        tick_number += 1


@contextmanager
def keyboard() -> Iterator[WaitForKeys | None]:
    """Yield a function that waits for a key, or None if input or output is not a terminal.

    Keys are read without Enter and without echo; the terminal is restored at the end. Ctrl-C still
    interrupts.
    """
    if not (sys.stdin and sys.stdin.isatty() and is_capable_terminal(sys.stdout)):
        yield None
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    saved_mode = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda seconds: _read_keys(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved_mode)


def _read_keys(descriptor: int, seconds: float) -> str:
    readable_descriptors, _, _ = wait_until_readable([descriptor], [], [], seconds)
    if not readable_descriptors:
        return ""
    try:
        typed_keys = os.read(descriptor, 64).decode(errors="replace")
    except OSError:
        typed_keys = ""
    if not typed_keys:
        raise Quit  # the terminal was closed
    # An arrow or function key sends Escape and further characters; such keys are ignored.
    return "" if typed_keys.startswith("\x1b") and len(typed_keys) > 1 else typed_keys
