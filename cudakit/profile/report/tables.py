"""The tables of a profile's report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

from cudakit.profile.findings import call_site_text
from cudakit.profile.result import (
    DIRECTION_NAMES,
    Collective,
    Copies,
    Device,
    Grid,
    HostWait,
    Kernel,
    LaunchLimit,
    Limit,
    Line,
    NamedRange,
    ProfileResult,
    Steps,
    StreamWork,
)
from cudakit.report.document import (
    Bytes,
    Column,
    Count,
    Node,
    Note,
    Rate,
    Ratio,
    Seconds,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.trace.kinds import Direction
from cudakit.trace.names import short_kernel, short_kernels
from cudakit.units import capitalized, format_count, format_ratio, format_seconds

_T = TypeVar("_T")
_Kind: TypeAlias = Literal["number", "text", "stack", "bar"]
Columns: TypeAlias = Sequence[tuple[str, _Kind, Callable[[_T], Value]]]
_LINE: tuple[str, _Kind, Callable[[Kernel | Copies | Collective | HostWait], Value]] = (
    "line",
    "text",
    lambda row: Text(call_site_text(row.stack, row.site)),
)
_OVERLAP: tuple[str, _Kind, Callable[[Copies | Collective], Value]] = (
    "overlap",
    "number",
    lambda row: Ratio(share_of(row.overlapped_ns, row.total_ns)),
)
TableName: TypeAlias = Literal["kernel", "line", "range"]

# The name of each cause of idle time in reports, and its meaning.
CAUSES = {
    "launch_ns": ("launch-bound", "the GPU waited for the host to launch more work"),
    "host_wait_ns": ("host waits", "the host waited for the GPU, then the GPU for new work"),
    "allocation_ns": ("memory allocation", "the host called the driver to allocate or free memory"),
    "data_loading_ns": ("data loading", "the host prepared data before it copied them to the GPU"),
    "other_host_ns": (
        "other host work",
        "gaps of at least 1 ms between CUDA calls of the host; a mean can be shorter",
    ),
    "dependency_ns": ("dependencies", "enqueued work waited for other streams or earlier work"),
    "unknown_ns": ("unknown", "the launch of the next work was not recorded"),
    "not_started_ns": ("before the first work", "no work had been enqueued yet"),
    "ended_ns": ("after the last work", "no more work was enqueued"),
}
_NO_GRID_LIMITS = (
    "the log lacks the number of threads, blocks and registers that a multiprocessor of the device has; "
    "record the profile again with cudakit run --profile"
)
_WITHIN_DEVICE = DIRECTION_NAMES[Direction.DEVICE_TO_DEVICE]
_BYTES_WITHIN_DEVICE = (
    "Copies within the device: each copied byte counts once, though it is read and written."
)


def device_nodes(device: Device, top: int, by: TableName | None) -> Iterator[Node]:
    """Yield the tables of a device; ``by`` selects one of the work tables."""
    yield _time_table(device)
    if by in (None, "kernel") and device.kernels:
        yield Section("Kernels", (_kernel_table(device, top),))
    if by == "kernel" or (by is None and not top):
        yield from _grid_table(device, top)
    if by in (None, "line") and device.lines:
        yield Section("Lines", (_line_table(device, top),))
    if by in (None, "range") and device.ranges:
        yield Section("NVTX ranges", (_range_table(device, top),))
    if by and not getattr(device, f"{by}s"):
        title, text = {
            "kernel": ("Kernels", "no kernel ran"),
            "line": ("Lines", "no call stacks were recorded"),
            "range": ("NVTX ranges", "no GPU work was launched in an NVTX range"),
        }[by]
        yield Section(title, (Note("info", text),))
    if device.copies:
        yield Section("Copies", (_copy_table(device, top),))
    if device.collectives:
        yield Section("Collectives", (_collective_table(device, top),))
    if device.waits:
        yield Section("Waits and allocations of the host", (_wait_table(device, top),))
    if len(device.streams) > 1:
        yield Section("Streams", (_stream_table(device, top),))


def _time_table(device: Device) -> Table:
    time = device.measured
    rows = [("busy", "at least one kernel, copy or memset ran", time.busy_ns)]
    rows += [
        (f"idle: {name}", meaning, getattr(time.idle, field))
        for field, (name, meaning) in CAUSES.items()
        if getattr(time.idle, field)
    ]
    steps = device.steps.measured
    columns: Columns[tuple[str, str, int]] = (
        ("time per step" if steps else "time", "text", lambda row: Text(row[0])),
        (
            "mean" if steps else "total",
            "number",
            lambda row: Seconds(row[2] / 1e9 / max(steps, 1)),
        ),
        ("share", "bar", lambda row: Ratio(row[2] / time.length_ns if time.length_ns else 0.0)),
        ("meaning", "text", lambda row: Text(row[1])),
    )
    return make_table(columns, rows, _steps_sentence(device.steps))


def _steps_sentence(steps: Steps) -> str:
    if not steps.measured:
        return (
            "No steps were found, so the tables cover the time from the first to the last work. To mark "
            "steps, use an NVTX range: with cudakit.range('step')."
        )
    definition = {
        "range": f"is an NVTX range '{steps.name}'",
        "mark": "ends with a call of optimizer.step() of PyTorch",
        "repetition": "is a repetition of the same sequence of launches",
    }[steps.source]
    text = f"{count_text('step', steps.measured)} measured; each {definition}."
    if steps.warm_up:
        first = (
            "The first step is" if steps.warm_up == 1 else f"The first {steps.warm_up:,} steps are"
        )
        text += f" {first} warm-up and left out."
    if steps.slow:
        slow_ns = sum(step.time.length_ns for step in steps.steps if step.is_slow)
        text += (
            f" {steps.slow:,} later {'step is' if steps.slow == 1 else 'steps are'} more than 3 times "
            f"slower than the median and left out ({duration_text(slow_ns)})."
        )
    return capitalized(text)


def _kernel_table(device: Device, top: int) -> Table:
    short_names = short_kernels(kernel.name for kernel in device.kernels)
    columns: Columns[Kernel] = (
        ("kernel", "text", lambda row: Text(short_names[row.name])),
        _count("calls", "calls"),
        _seconds("total", "total_ns"),
        _seconds("mean", "mean_ns"),
        ("share", "number", lambda row: Ratio(row.share)),
        _LINE,
    )
    caption = "Share: of the time of all GPU work."
    if any(" #" in short_name for short_name in short_names.values()):
        caption += " #1, #2: different kernels whose short names are equal."
    if any(kernel.sites > 1 for kernel in device.kernels):
        caption += " Line: the call site whose launches of the kernel took the most time."
    return _limited_table(columns, device.kernels, top, ("kernel", "kernels"), caption)


def _line_table(device: Device, top: int) -> Table:
    columns: Columns[Line] = (
        ("line", "text", lambda row: Text(f"{call_site_text((row.frame,), 0)} {row.frame.name}")),
        _seconds("own", "own_ns"),
        _seconds("cumulative", "cumulative_ns"),
        _count("launches", "calls"),
        ("share", "bar", lambda row: Ratio(row.share)),
    )
    caption = (
        "Own: GPU time of the work that the line launched itself. Cumulative: also of the functions that it "
        "called. Share: cumulative time as a share of the time of all GPU work."
    )
    return _limited_table(columns, device.lines, top, ("line", "lines"), caption)


def _range_table(device: Device, top: int) -> Table:
    columns: Columns[NamedRange] = (
        (
            "range",
            "text",
            lambda row: Text(f"{row.domain}: {row.name}" if row.domain else row.name),
        ),
        _count("launches", "count"),
        _seconds("GPU time", "total_ns"),
        ("share", "bar", lambda row: Ratio(row.share)),
    )
    return _limited_table(columns, device.ranges, top, ("range", "ranges"))


def _copy_table(device: Device, top: int) -> Table:
    columns: Columns[Copies] = (
        ("direction", "text", lambda row: Text(row.name)),
        _count("calls", "calls"),
        ("copied", "number", lambda row: Bytes(row.size_bytes)),
        _seconds("time", "total_ns"),
        ("rate", "number", lambda row: _rate(row.bytes_per_s)),
        _OVERLAP,
        _LINE,
    )
    caption = (
        f"Overlap: the share of the copy time in which a kernel ran at the same time, "
        f"{format_ratio(share_of(device.copies_overlapped_ns, device.copies_ns))} for all copies together."
    )
    if any(copies.name == _WITHIN_DEVICE for copies in device.copies):
        caption += f" {_BYTES_WITHIN_DEVICE}"
    return _limited_table(
        columns,
        device.copies,
        top,
        ("kind of copies", "kinds of copies"),
        caption,
        optional=("copied",),
    )


def _collective_table(device: Device, top: int) -> Table:
    columns: Columns[Collective] = (
        ("collective", "text", lambda row: Text(short_kernel(row.name))),
        _count("calls", "calls"),
        ("size", "number", lambda row: Bytes(row.size_bytes) if row.size_bytes else Text("-")),
        ("mean", "number", lambda row: Seconds(row.total_ns / row.calls / 1e9)),
        ("busbw", "number", lambda row: _rate(row.bus_bytes_per_s)),
        _OVERLAP,
        _LINE,
    )
    caption = (
        "Busbw: the bus bandwidth as nccl-tests define it; the time includes the wait for other ranks. "
        "Overlap: the share of the time in which another kernel ran at the same time."
    )
    if any(row.size_bytes is None for row in device.collectives):
        caption += " NCCL 2.28 or newer reports sizes, except those of collectives in CUDA graphs."
    return _limited_table(
        columns,
        device.collectives,
        top,
        ("collective", "collectives"),
        caption,
        optional=("size",),
    )


def _wait_table(device: Device, top: int) -> Table:
    columns: Columns[HostWait] = (
        ("call", "text", lambda row: Text(row.function)),
        _LINE,
        _count("calls", "calls"),
        _seconds("host time", "blocked_ns"),
        _seconds("GPU idle", "idle_ns"),
    )
    return _limited_table(columns, device.waits, top, ("call site", "call sites"))


def _stream_table(device: Device, top: int) -> Table:
    columns: Columns[StreamWork] = (
        _count("stream", "stream"),
        _count("launches", "calls"),
        _seconds("busy", "busy_ns"),
        _seconds("alone", "alone_ns"),
    )
    caption = "Alone: the time in which only this stream had running work."
    return _limited_table(columns, device.streams, top, ("stream", "streams"), caption)


def limit_tables(
    result: ProfileResult, device_names: Mapping[tuple[int, int], str]
) -> Iterator[Node]:
    """Yield the table of measured limits, if the result has them.

    ``device_names`` has the name of each device of the profile by PID and CUDA index. Each row of several
    devices begins with the name.
    """
    limits: list[tuple[Limit | LaunchLimit, str, Value, Value]] = [
        (limit, limit.name, Rate(limit.bytes_per_s, "B"), Rate(limit.limit_bytes_per_s, "B"))
        for limit in result.limits
    ]
    limits += [
        (
            limit,
            "mean interval of kernel launches",
            Seconds(limit.interval_ns / 1e9),
            Seconds(limit.limit_interval_ns / 1e9),
        )
        for limit in result.launch_limits
    ]
    columns: Columns[tuple[Limit | LaunchLimit, str, Value, Value]] = (
        ("device", "text", lambda row: Text(device_names[row[0].process, row[0].device])),
        (
            "work",
            "text",
            lambda row: Text(
                f"{row[1]}{' (limit of a simulated GPU)' if row[0].simulated else ''}"
            ),
        ),
        ("profile", "number", lambda row: row[2]),
        ("limit", "number", lambda row: row[3]),
        ("share", "bar", lambda row: Ratio(row[0].share)),
    )
    if limits:
        shown = columns if len(device_names) > 1 else columns[1:]
        table = make_table(shown, limits, _limit_caption(result))
        yield Section("Limits that cudakit bench measured", (table,))


def _limit_caption(result: ProfileResult) -> str:
    sentences = []
    if result.limits:
        sentences.append("Share of rates: the profile divided by the limit.")
    if result.launch_limits:
        sentences.append(
            "Interval of launches: the measured time divided by the number of kernel launches. "
            "Share of launches: the limit divided by the profile; at 100% the program launches as fast as "
            "possible."
        )
    sentences.append("Copies and memsets with a mean size below 1 MiB are not compared.")
    if any(limit.share > 1 for limit in result.limits + result.launch_limits):
        sentences.append(
            "A share above 100% means that the limit does not fit: it was measured with other sizes, or on "
            "another or a simulated GPU."
        )
    if short_count := sum(limit.short_kernels for limit in result.launch_limits):
        work_ns = {(device.process, device.device): device.work_ns for device in result.devices}
        short_ns = sum(
            limit.short_kernels_share * work_ns[limit.process, limit.device]
            for limit in result.launch_limits
        )
        share = share_of(short_ns, sum(work_ns.values()))
        of_all = " of all devices" if len(work_ns) > 1 else ""
        sentences.append(
            "Kernels whose median run takes no longer than the launch of an empty kernel: "
            f"{count_text('run', short_count)}, {format_ratio(share)} of the GPU time{of_all}. Only "
            "fewer launches make them faster."
        )
    sentences.append(
        "Bytes and FLOPs of kernels are not recorded: their rates cannot be compared with limits."
    )
    if any(limit.name.endswith(_WITHIN_DEVICE) for limit in result.limits):
        sentences.append(f"{_BYTES_WITHIN_DEVICE} The measured limit counts them in the same way.")
    return " ".join(sentences)


def _grid_table(device: Device, top: int) -> Iterator[Node]:
    """Yield the table of the kernels' grids, or why it is not shown."""
    kernels = [(kernel, kernel.grid) for kernel in device.kernels if kernel.grid]
    if not kernels:
        if device.kernels:
            note = Note("info", f"not shown: {_NO_GRID_LIMITS}")
            yield Section("Grids of the kernels", (note,))
        return
    short_names = short_kernels(kernel.name for kernel in device.kernels)
    columns: Columns[tuple[Kernel, Grid]] = (
        ("kernel", "text", lambda row: Text(short_names[row[0].name])),
        ("share", "number", lambda row: Ratio(row[0].share)),
        ("blocks", "number", lambda row: Count(row[1].blocks)),
        ("block size", "number", lambda row: Count(row[1].threads_per_block)),
        ("SMs", "number", lambda row: Ratio(row[1].multiprocessors_share)),
        ("threads", "number", lambda row: Ratio(row[1].threads_share)),
        ("waves", "number", lambda row: Text(f"{row[1].waves:.2f}")),
        ("tail", "number", lambda row: Ratio(row[1].tail_share)),
    )
    caption = (
        "The longest run of each kernel. SMs: share of the multiprocessors that get a block. Threads: the "
        "kernel's resident threads as a share of the maximum of the device. Waves: blocks divided by the "
        "blocks that run at the same time. Tail: the empty part of the last wave, as a share of all waves."
    )
    table = _limited_table(columns, kernels, top, ("kernel", "kernels"), caption)
    yield Section("Grids of the kernels", (table,))


# --- building tables -------------------------------------------------------------------------------


def _seconds(title: str, field: str) -> tuple[str, _Kind, Callable[[object], Value]]:
    """Return the column of a time in nanoseconds."""
    return title, "number", lambda row: Seconds(getattr(row, field) / 1e9)


def _count(title: str, field: str) -> tuple[str, _Kind, Callable[[object], Value]]:
    return title, "number", lambda row: Count(getattr(row, field))


def _rate(bytes_per_s: float | None) -> Value:
    return Rate(bytes_per_s, "B") if bytes_per_s else Text("-")


def make_table(
    columns: Columns[_T], items: Iterable[_T], caption: str = "", *, optional: Collection[str] = ()
) -> Table:
    """Return a table with a row for each item. Narrow terminals hide the optional columns first."""
    return Table(
        tuple(Column(title, kind, is_optional=title in optional) for title, kind, _ in columns),
        tuple(tuple(value_of(item) for _, _, value_of in columns) for item in items),
        caption,
    )


def _limited_table(
    columns: Columns[_T],
    items: Sequence[_T],
    top: int,
    nouns: tuple[str, str],
    caption: str = "",
    *,
    optional: Collection[str] = (),
) -> Table:
    """Return a table of the first ``top`` items, 0 for all; the caption counts the rest."""
    shown = items[:top] if top else items
    if omitted := len(items) - len(shown):
        noun = nouns[0] if omitted == 1 else nouns[1]
        caption = f"{caption} {omitted:,} more {noun}: --top 0 shows all.".lstrip()
    return make_table(columns, shown, caption, optional=optional)


def share_of(part_ns: float, total_ns: float) -> float:
    """Return a part as a share of a total, 0 if the total is 0."""
    return part_ns / total_ns if total_ns else 0.0


def duration_text(time_ns: float) -> str:
    """Return a time in nanoseconds as text."""
    return format_seconds(time_ns / 1e9)


def count_text(name: str, noun_count: int) -> str:
    """Return a count with its noun: ``2 steps``."""
    return f"{format_count(noun_count)} {name if noun_count == 1 else f'{name}s'}"
