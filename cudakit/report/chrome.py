"""Write a timeline in the Trace Event Format, which chrome://tracing and ui.perfetto.dev read.

The format is JSON with times in microseconds. Perfetto has these limits (importers/json): it drops a span
that overlaps another span of its thread without nesting, reads a time as a double and truncates it to
nanoseconds, and rejects a file with an escaped surrogate pair.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from cudakit.report.timeline import (
    Argument,
    Column,
    Counter,
    Instants,
    Spans,
    Texts,
    Timeline,
    printable_text,
    row_blocks,
)

_BLOCK_ROWS = 4096
_COMPRESSION_LEVEL = 3
_GZIP_FORMAT = 31  # the value of zlib's ``wbits`` for gzip
# First number of the process sort index of devices, which are below the processes.
_FIRST_DEVICE_PLACE = 5_000_000

# Perfetto multiplies a double by 1000 and truncates 1.001 us to 1000 ns. A tenth of a nanosecond prevents it.
_TIME = '"ts":%d.%03d1'


def render(timeline: Timeline) -> Iterator[str]:
    """Yield a trace in pieces of bounded size."""
    writer = _Writer(timeline)
    head = json.dumps(timeline.chrome_head, ensure_ascii=False, separators=(",", ":"))
    yield f'{head[:-1]}{"," if timeline.chrome_head else ""}"traceEvents":['
    separator = "\n"
    for events in writer.blocks():
        if text := ",\n".join(events):
            yield separator + text
            separator = ",\n"
    yield "\n]}\n"


def render_compressed(timeline: Timeline) -> Iterator[bytes]:
    """Yield a trace that is compressed by gzip."""
    compressor = zlib.compressobj(_COMPRESSION_LEVEL, wbits=_GZIP_FORMAT)
    for text in render(timeline):
        yield compressor.compress(text.encode())
    yield compressor.flush()


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        tracks, groups = timeline.tracks, timeline.groups
        self._pids = np.array([groups[track.group].number for track in tracks], np.int64)
        self._tids = np.array([track.number for track in tracks], np.int64)
        self._json_by_texts: dict[int, dict[int, str]] = {}

    def blocks(self) -> Iterator[Iterable[str]]:
        """Yield the events as JSON objects."""
        yield self._names()
        for instants in self._timeline.instants:
            yield from self._instants(instants)
        for counter in self._timeline.counters:
            yield from self._counter(counter)
        for spans in self._timeline.spans:
            yield from self._spans(spans)
        yield from self._arrows()

    def _names(self) -> Iterator[str]:
        groups = self._timeline.groups
        has_processes = len({group.process for group in groups}) > 1
        for group in groups:
            pid = group.number
            of_process = f" of process {group.process}" if group.is_device and has_processes else ""
            name = f"{group.name}{of_process}{group.remark}"
            yield _metadata("process_name", pid, 0, "name", name)
            if group.label:
                yield _metadata("process_labels", pid, 0, "labels", group.label)
            place = _FIRST_DEVICE_PLACE + pid if group.is_device else pid
            yield _metadata("process_sort_index", pid, 0, "sort_index", place)
        for index, track in enumerate(self._timeline.tracks):
            pid = groups[track.group].number
            yield _metadata("thread_name", pid, track.number, "name", track.name)
            yield _metadata("thread_sort_index", pid, track.number, "sort_index", index)

    def _spans(self, spans: Spans) -> Iterator[Iterable[str]]:
        for rows in row_blocks(len(spans.start_ns), _BLOCK_ROWS):
            texts = np.empty(len(rows), object)
            for number, kind in enumerate(spans.kinds):
                is_of_kind = spans.kind[rows] == number
                rows_of_kind = rows[is_of_kind]
                if not len(rows_of_kind):
                    continue
                category = kind.chrome_category or kind.category
                arguments, columns = self._arguments(kind.arguments(rows_of_kind))
                template = (
                    f'{{"ph":"X",{_category(category)}"name":%s,"pid":%d,"tid":%d,{_TIME},'
                    f'"dur":%d.%03d{arguments}}}'
                )
                track = spans.track[rows_of_kind]
                start, end = spans.start_ns[rows_of_kind], spans.end_ns[rows_of_kind]
                texts[is_of_kind] = list(
                    _filled(
                        template,
                        self._json_texts(spans.names, spans.name[rows_of_kind]),
                        self._pids[track].tolist(),
                        self._tids[track].tolist(),
                        *self._time_columns(start),
                        *(column.tolist() for column in np.divmod(end - start, 1000)),
                        *columns,
                    )
                )
            yield texts.tolist()

    def _instants(self, instants: Instants) -> Iterator[Iterable[str]]:
        is_of_group = instants.track < 0
        first_group = self._timeline.groups[0].number
        for is_shown, scope in ((is_of_group, "p"), (~is_of_group, "t")):
            rows = np.flatnonzero(is_shown)
            if not len(rows):
                continue
            track = instants.track[rows]
            no_pids = np.full(len(rows), first_group)
            arguments, columns = self._arguments(
                [
                    Argument(one.name, one.values[rows], one.texts, one.chrome_name)
                    for one in instants.arguments
                ]
            )
            yield _filled(
                f'{{"ph":"i","s":"{scope}",{_category(instants.category)}"name":%s,"pid":%d,"tid":%d,'
                f"{_TIME}{arguments}}}",
                self._json_texts(instants.names, instants.name[rows]),
                (no_pids if scope == "p" else self._pids[track]).tolist(),
                (no_pids if scope == "p" else self._tids[track]).tolist(),
                *self._time_columns(instants.time_ns[rows]),
                *columns,
            )

    def _counter(self, counter: Counter) -> Iterator[Iterable[str]]:
        name = _quote(counter.name).replace("%", "%%")
        pid = self._timeline.groups[0].number
        template = f'{{"ph":"C",{_TIME},"pid":{pid},"name":{name},"args":{{"{counter.unit}":%s}}}}'
        for rows in row_blocks(len(counter.values), _BLOCK_ROWS):
            times = self._time_columns(counter.time_ns[rows])
            yield _filled(template, *times, counter.values[rows].tolist())

    def _arrows(self) -> Iterator[Iterable[str]]:
        """Yield an arrow from each span where one begins to the first span where it ends."""
        tables = [(spans, spans.arrow) for spans in self._timeline.spans if spans.arrow is not None]
        for begins_arrows, phase in ((True, '"ph":"s"'), (False, '"ph":"f","bp":"e"')):
            template = f'{{{phase},"cat":"ac2g","name":"ac2g","id":%d,"pid":%d,"tid":%d,{_TIME}}}'
            for spans, arrow in tables:
                if spans.begins_arrows is not begins_arrows:
                    continue
                numbers, first_rows = np.unique(arrow, return_index=True)
                first_rows, numbers = first_rows[numbers != 0], numbers[numbers != 0]
                for block in row_blocks(len(first_rows), _BLOCK_ROWS):
                    rows = first_rows[block]
                    track = spans.track[rows]
                    yield _filled(
                        template,
                        numbers[block].tolist(),
                        self._pids[track].tolist(),
                        self._tids[track].tolist(),
                        *self._time_columns(spans.start_ns[rows]),
                    )

    def _time_columns(self, times_ns: Column) -> list[list[int]]:
        """Return times as microseconds and the remaining nanoseconds."""
        return [column.tolist() for column in np.divmod(times_ns - self._timeline.begin_ns, 1000)]

    def _arguments(self, arguments: Sequence[Argument]) -> tuple[str, list[Iterable[object]]]:
        """Return the template of the arguments of events, and its columns."""
        members, columns = [], list[Iterable[object]]()
        for argument in arguments:
            name = argument.name if argument.chrome_name is None else argument.chrome_name
            values = argument.values
            if not name:
                continue
            key = _quote(name).replace("%", "%%")
            if values.ndim == 2:
                members.append(f"{key}:[{','.join(['%d'] * values.shape[1])}]")
                columns += [values[:, axis].tolist() for axis in range(values.shape[1])]
                continue
            members.append(f"{key}:%s")
            if argument.texts is not None:
                columns.append(self._json_texts(argument.texts, values))
            elif argument.is_address:
                columns.append([f'"{item:#x}"' for item in values.tolist()])
            elif values.dtype.kind == "f":
                columns.append(
                    [f"{item:.6g}" if math.isfinite(item) else "null" for item in values.tolist()]
                )
            else:
                columns.append(values.tolist())
        return f',"args":{{{",".join(members)}}}' if members else "", columns

    def _json_texts(self, texts: Texts, indices: Column) -> list[str]:
        """Return texts as JSON strings, each of which is made once."""
        known = self._json_by_texts.setdefault(id(texts), {})
        index_list = indices.tolist()
        for index in set(index_list).difference(known):
            known[index] = json.dumps(texts.text(index), ensure_ascii=False)
        return list(map(known.__getitem__, index_list))


def _filled(template: str, *columns: Iterable[object]) -> Iterator[str]:
    fill: Callable[[object], str] = template.__mod__
    return map(fill, zip(*columns, strict=True))


def _category(category: str) -> str:
    return f'"cat":"{category}",' if category else ""


def _quote(text: str) -> str:
    return json.dumps(printable_text(text), ensure_ascii=False)


def _metadata(kind: str, pid: int, tid: int, key: str, value: str | int) -> str:
    text = _quote(value) if isinstance(value, str) else value
    return f'{{"ph":"M","name":"{kind}","pid":{pid},"tid":{tid},"ts":0,"args":{{"{key}":{text}}}}}'
