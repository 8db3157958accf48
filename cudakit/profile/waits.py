"""Sum the calls in which the host waited, allocated or freed, by call site, with the idle time caused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from cudakit.profile.host_time import IdleCause
from cudakit.profile.idle import Gaps
from cudakit.profile.intervals import Ints, Mask, Times
from cudakit.profile.result import HostWait
from cudakit.profile.tables import groups, stack_of
from cudakit.profile.timeline import Timeline

_KINDS: dict[IdleCause, Literal["wait", "allocation"]] = {
    IdleCause.HOST_WAIT: "wait",
    IdleCause.ALLOCATION: "allocation",
}


def host_waits(
    timeline: Timeline,
    cause_of_call: Ints,
    gaps: Gaps,
    is_measured_on_host: Callable[[Times], Mask] | None,
    is_measured_on_device: Callable[[Times], Mask] | None,
) -> tuple[HostWait, ...]:
    """Return the calls that made the host wait, those with the most idle time first.

    ``is_measured_on_host`` and ``is_measured_on_device`` return whether times of calls and of gaps are in
    measured steps; the device runs later than the host. Without these functions, all times count.
    """
    calls = timeline.calls
    is_call_measured = np.ones(len(calls.start_ns), bool)
    if is_measured_on_host:
        is_call_measured = is_measured_on_host(calls.start_ns)
    is_gap_measured = np.ones(len(gaps.start_ns), bool)
    if is_measured_on_device:
        is_gap_measured = is_measured_on_device(gaps.start_ns)
    rows: list[HostWait] = []
    for cause, kind in _KINDS.items():
        call_rows = np.flatnonzero(is_call_measured & (cause_of_call == cause))
        idle_ns_by_site = _idle_by_site(gaps, is_gap_measured, cause)
        for site, index in groups(calls.site[call_rows]):
            rows_of_site = call_rows[index]
            stack, site_index = stack_of(timeline, site)
            rows.append(
                HostWait(
                    kind=kind,
                    function=_most_frequent_function(timeline, rows_of_site),
                    calls=len(rows_of_site),
                    blocked_ns=int(
                        (calls.end_ns[rows_of_site] - calls.start_ns[rows_of_site]).sum()
                    ),
                    idle_ns=idle_ns_by_site.get(site, 0),
                    stack=stack,
                    site=site_index,
                )
            )
    return tuple(sorted(rows, key=lambda row: (-row.idle_ns, -row.blocked_ns)))


def _idle_by_site(gaps: Gaps, is_gap_measured: Mask, cause: IdleCause) -> dict[int, int]:
    """Return the idle time of a cause by the call stack of the wait or allocation."""
    blocking = gaps.blocking
    rows = np.flatnonzero(is_gap_measured[blocking.gap] & (blocking.cause == cause))
    return {
        site: int(blocking.idle_ns[rows[index]].sum())
        for site, index in groups(blocking.site[rows])
    }


def _most_frequent_function(timeline: Timeline, rows: Ints) -> str:
    name_indices, call_counts = np.unique(timeline.calls.name[rows], return_counts=True)
    return timeline.names[int(name_indices[np.argmax(call_counts)])]
