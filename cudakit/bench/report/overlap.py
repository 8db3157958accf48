"""The overlap of copies and GEMMs: a sentence per direction, and a table of the times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from cudakit.bench.copy import is_pageable
from cudakit.bench.report.cases import cell
from cudakit.bench.result import CopyOverlap
from cudakit.report.document import (
    Bytes,
    Column,
    Node,
    Note,
    Rate,
    Ratio,
    Seconds,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, format_bytes

_ROUTES: Mapping[str, str] = MappingProxyType(
    {
        "h2d": "from pinned host memory to the device",
        "d2h": "from the device to pinned host memory",
        "pageable-h2d": "from pageable host memory to the device",
        "pageable-d2h": "from the device to pageable host memory",
        "d2d": "within the device",
    }
)
# An overlap of at least the first share is good; one below the second share is a problem.
_GOOD_SHARE, _BAD_SHARE = 0.9, 0.5
_PAGEABLE_REASON = (
    "Copies of pageable memory go through a pinned buffer of the driver. Their call blocks the host, so the "
    'GEMM is launched when the copy is over (CUDA Driver API, "API synchronization behavior").'
)
_PIN = "pin the host memory: pin_memory() of a tensor, or cudakit.pin(array) for existing memory"
_CAPTION = (
    ", which take about the same time. Together: from the first start to the last end, on two streams; "
    "the copies are launched first. Overlap = (copy + GEMM - together) / the shorter of copy and GEMM. Copy "
    "slowdown: time of the copies while GEMMs run all the time, compared with the time alone. GEMM slowdown: "
    "the same of the GEMMs while copies run"
)
_PAGEABLE_CAPTION = (
    '; "-" for pageable copies, which block the host, so that no GEMM can be launched'
)


def overlap_answers(overlaps: Sequence[CopyOverlap]) -> Iterator[Node]:
    """Yield a sentence per direction and size, then the table; nothing for other benches."""
    if not overlaps:
        return
    yield from (_answer(overlap, overlaps) for overlap in overlaps)
    if any(map(_is_blocked_by_pageable_memory, overlaps)):
        yield Note("info", _PAGEABLE_REASON, (_PIN,))
    yield _table(overlaps)


def _answer(overlap: CopyOverlap, overlaps: Sequence[CopyOverlap]) -> Note:
    """Return the sentence with the overlap of one direction and size."""
    has_several_sizes = len({overlap.size_bytes for overlap in overlaps}) > 1
    size = f" of {format_bytes(overlap.size_bytes)}" if has_several_sizes else ""
    copy_text = f"A copy{size} {_ROUTES[overlap.direction]}"
    share = overlap.overlap
    if isinstance(share, Unavailable):
        return Note("error", f"{copy_text}: the overlap with a GEMM is unknown: {share.reason}.")
    if _is_blocked_by_pageable_memory(overlap):
        return Note(
            "warn", f"{copy_text} overlaps {share:.0%} with a GEMM that is launched after it."
        )
    text = f"{copy_text} overlaps {share:.0%} with a GEMM{_describe_slowdowns(overlap)}."
    return Note("ok" if share >= _GOOD_SHARE else "info" if share >= _BAD_SHARE else "warn", text)


def _is_blocked_by_pageable_memory(overlap: CopyOverlap) -> bool:
    share = overlap.overlap
    is_low = not isinstance(share, Unavailable) and share < _BAD_SHARE
    return is_low and is_pageable(overlap.direction)


def _describe_slowdowns(overlap: CopyOverlap) -> str:
    """Return ``; the GEMM runs 3% slower, the copy 1% slower``; a change below 0.5% is no change."""
    percent_by_work = {
        name: round(100 * slowdown)
        for name, slowdown in (("GEMM", overlap.gemm_slowdown), ("copy", overlap.copy_slowdown))
        if not isinstance(slowdown, Unavailable)
    }
    if not percent_by_work:
        return ""
    if len(percent_by_work) == 2 and not any(percent_by_work.values()):
        return "; both run at full speed"
    changes = [
        f"{abs(percent)}% {'slower' if percent > 0 else 'faster'}" if percent else "at full speed"
        for percent in percent_by_work.values()
    ]
    first_name, *other_names = percent_by_work
    texts = [f"the {first_name} runs {changes[0]}"]
    texts += [
        f"the {name} {change_text}"
        for name, change_text in zip(other_names, changes[1:], strict=True)
    ]
    return f"; {', '.join(texts)}"


def _table(overlaps: Sequence[CopyOverlap]) -> Table:
    columns = (
        Column("direction", "text"),
        Column("size", "number"),
        Column("copy", "number"),
        Column("GEMM", "number"),
        Column("together", "number"),
        Column("overlap", "number"),
        Column("copy slowdown", "number"),
        Column("GEMM slowdown", "number"),
        Column("copy rate", "number", is_optional=True),
        Column("GEMM rate", "number", is_optional=True),
        Column("copies/GEMMs", "number", is_optional=True),
    )
    rows = tuple(
        (
            Text(overlap.direction),
            Bytes(overlap.size_bytes),
            cell(Seconds, overlap.copy_s),
            cell(Seconds, overlap.gemm_s),
            cell(Seconds, overlap.both_s),
            cell(Ratio, overlap.overlap),
            _slowdown(overlap.copy_slowdown),
            _slowdown(overlap.gemm_slowdown),
            cell(lambda rate: Rate(rate, "B"), overlap.copy_bytes_per_s),
            cell(lambda rate: Rate(rate, "FLOP"), overlap.gemm_flop_per_s),
            Text(f"{overlap.copies}/{overlap.gemms}" if overlap.copies else "-"),
        )
        for overlap in overlaps
    )
    has_pageable = any(is_pageable(overlap.direction) for overlap in overlaps)
    caption = (
        f"Copy, GEMM: time alone of {_range([overlap.copies for overlap in overlaps])} copies and "
        f"{_range([overlap.gemms for overlap in overlaps])} GEMMs{_CAPTION}"
    )
    return Table(columns, rows, f"{caption}{_PAGEABLE_CAPTION if has_pageable else ''}.")


def _range(counts: Sequence[int]) -> str:
    """Return ``2 to 3``, or the number if all counts are equal; cases that were not measured have none."""
    measured_counts = [count for count in counts if count] or [0]
    lowest_count, highest_count = min(measured_counts), max(measured_counts)
    return (
        str(lowest_count) if lowest_count == highest_count else f"{lowest_count} to {highest_count}"
    )


def _slowdown(slowdown: float | Unavailable) -> Value:
    """Return the slowdown as a percentage; "-" for work that cannot be measured."""
    return Text("-") if isinstance(slowdown, Unavailable) else Ratio(slowdown)
