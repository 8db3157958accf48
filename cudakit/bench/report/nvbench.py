"""A result in nvbench's JSON format, so that nvbench's scripts can read and compare the result.

The input is the Columns ``results`` and ``device`` (see ``columns``). The format is version 1.0.0, written by
nvbench/json_printer.cu; the tags are those of nvbench/detail/measure_cold.cu, which nvbench's scripts read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from cudakit.errors import UsageError
from cudakit.report.document import Columns, Document, walk

_VERSION = {"major": 1, "minor": 0, "patch": 0, "string": "1.0.0"}
_FIRST_FIGURE = "median_s"

_Json: TypeAlias = dict[str, Any]
_Row: TypeAlias = Mapping[str, Any]

# Summaries with the value of one column: tag, name, hint, column.
_SUMMARIES = (
    ("nv/cold/sample_size", "Samples", "sample_size", "samples"),
    ("nv/cold/time/gpu/min", "Min GPU Time", "duration", "minimum_s"),
    ("nv/cold/time/gpu/max", "Max GPU Time", "duration", "maximum_s"),
    ("nv/cold/time/gpu/mean", "GPU Time", "duration", "mean_s"),
    ("nv/cold/time/gpu/stdev/absolute", "Noise", "duration", "stdev_s"),
    ("nv/cold/time/gpu/q1", "Q1 GPU Time", "duration", "q1_s"),
    ("nv/cold/time/gpu/median", "Median GPU Time", "duration", "median_s"),
    ("nv/cold/time/gpu/q3", "Q3 GPU Time", "duration", "q3_s"),
    ("nv/cold/sm_clock_rate/mean", "Clock Rate", "frequency", "sm_clock_hz"),
    ("nv/cold/bw/item_rate", "Elem/s", "item_rate", "operations_per_s"),
    ("nv/cold/bw/global/bytes_per_second", "GlobalMem BW", "byte_rate", "bytes_per_s"),
)


def nvbench(document: Document) -> str:
    """Return a document's cases as nvbench's JSON text; a case without a time is a skipped state.

    Raises UsageError if the document has no Columns ``results`` with figures.
    """
    rows_by_name = {
        node.name: _rows(node) for node in walk(document.nodes) if isinstance(node, Columns)
    }
    rows = rows_by_name.get("results", [])
    if not rows or _FIRST_FIGURE not in rows[0]:
        raise UsageError(
            f"{document.title!r} has no results that nvbench's format can express",
            hint="choose another output format, such as json",
        )
    result = {
        "meta": {"argv": [document.title], "version": {"json": _VERSION}},
        "devices": [_device(next(iter(rows_by_name.get("device", [])), {}))],
        "benchmarks": [
            _benchmark(str(name), index, [row for row in rows if row["name"] == name])
            for index, name in enumerate(dict.fromkeys(row["name"] for row in rows))
        ],
    }
    return json.dumps(result, indent=2) + "\n"


def _rows(columns: Columns) -> list[_Row]:
    """Return the rows as dicts by column name, with texts decoded, and None for missing values."""

    def cell(item: Any, texts: tuple[str, ...] | None) -> Any:
        if texts is not None:
            return texts[item] if 0 <= item < len(texts) else None
        return None if isinstance(item, float) and not math.isfinite(item) else item

    cells = [
        [cell(item, columns.text.get(name)) for item in array.tolist()]
        for name, array in columns.arrays.items()
    ]
    return [dict(zip(columns.arrays, row, strict=True)) for row in zip(*cells, strict=True)]


def _device(row: _Row) -> _Json:
    def rounded(name: str) -> int:
        return round(row.get(name) or 0)

    capability = str(row.get("compute_capability") or "0.0").split(".")
    sm_version = int("".join(capability)) * 10 if all(map(str.isdigit, capability)) else 0
    clock_hz, bus_bits = rounded("memory_clock_hz"), rounded("memory_bus_bits")
    return {
        "id": 0,
        "name": row.get("gpu") or "unknown",
        "sm_version": sm_version,
        "ptx_version": sm_version,
        "sm_default_clock_rate": rounded("sm_clock_max_hz"),
        "number_of_sms": rounded("multiprocessors"),
        "global_memory_size": rounded("memory_bytes"),
        "global_memory_bus_peak_clock_rate": clock_hz,
        "global_memory_bus_width": bus_bits,
        "global_memory_bus_bandwidth": 2 * clock_hz * bus_bits // 8,
        "l2_cache_size": rounded("l2_bytes"),
    }


def _benchmark(name: str, index: int, rows: list[_Row]) -> _Json:
    columns = list(rows[0])
    axis_columns = columns[columns.index("name") + 1 : columns.index(_FIRST_FIGURE)]
    axes: list[_Json] = []
    for axis in axis_columns:
        values = [row[axis] for row in rows if row[axis] is not None]
        if not values:
            continue
        kind = _kind(values)
        items = [
            {
                "input_string": str(value),
                "description": "",
                "value": str(value) if kind == "string" else value,
            }
            for value in dict.fromkeys(values)
        ]
        axes.append({"name": axis, "type": kind, "flags": "", "values": items})
    return {
        "name": name,
        "index": index,
        "devices": [0],
        "axes": axes,
        "states": [_state(row, axis_columns) for row in rows],
    }


def _kind(values: list[Any]) -> str:
    kinds = {type(value) for value in values}
    return "int64" if kinds == {int} else "float64" if kinds == {float} else "string"


def _state(row: _Row, axes: list[str]) -> _Json:
    row_axes = [axis for axis in axes if row[axis] is not None]
    is_skipped = row[_FIRST_FIGURE] is None
    return {
        "name": " ".join(["Device=0", *(f"{axis}={row[axis]}" for axis in row_axes)]),
        "device": 0,
        "type_config_index": 0,
        "axis_values": [_value(axis, row[axis]) for axis in row_axes],
        "summaries": [] if is_skipped else list(_summaries(row)),
        "is_skipped": is_skipped,
        **({"skip_reason": "no time was reported"} if is_skipped else {}),
    }


def _summaries(row: _Row) -> Iterator[_Json]:
    figures = [(*summary[:3], row.get(summary[3])) for summary in _SUMMARIES]
    q1, q3 = row.get("q1_s"), row.get("q3_s")
    range_s = None if q1 is None or q3 is None else q3 - q1
    for tag, name, amount, total in (
        ("nv/cold/time/gpu/stdev/relative", "Noise", row.get("stdev_s"), row.get("mean_s")),
        ("nv/cold/time/gpu/iqr/relative", "Rel IQR", range_s, row.get("median_s")),
    ):
        figures.append(
            (tag, name, "percentage", amount / total if amount is not None and total else None)
        )
    figures.append(("nv/cold/time/gpu/iqr/absolute", "IQR", "duration", range_s))
    for tag, name, hint, value in figures:
        if value is not None:
            yield {"tag": tag, "name": name, "hint": hint, "data": [_value("value", value)]}


def _value(name: str, value: Any) -> _Json:
    # nvbench writes numbers as strings, because JSON numbers are doubles, which cannot represent every int64.
    return {"name": name, "type": _kind([value]), "value": str(value)}
