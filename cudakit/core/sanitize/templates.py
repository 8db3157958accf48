"""Insert the accesses of launches that were not recorded because a template has them.

A template consists of the accesses of an earlier launch, which the recorder compared with those of a launch
before it: ``gpu/capture/recorder/exact/templates.h``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from cudakit.core.sanitize.races import Coverage, Operation, Race
from cudakit.trace.kinds import EventKind, Precision, TemplateCheck
from cudakit.trace.layout import RECORD, Records, concatenate_records, view

UNKNOWN_TEMPLATE: Final = "launch whose template was not recorded"

# The fields that the accesses of a launch have in common with the launch.
_CALL_FIELDS: Final = ("seq", "time_ns", "thread", "stream", "context", "site", "device")


class TemplateAccesses:
    """The templates of one trace."""

    def __init__(self) -> None:
        self.unknown_count = 0  # number of launches whose template is unknown
        self._accesses: dict[int, Records] = {}  # Access and Accessed records by template
        self._is_from_template = bytearray()  # a bit for each call

    def insert(self, records: Records, coverage: Coverage) -> Records:
        """Insert the accesses of launches with a template after each launch, and count these launches.

        ``records`` are in the order of their calls, and have all records of each call.
        """
        kinds = records["kind"]
        template_ids = _template_ids(records, kinds)
        positions = np.flatnonzero((template_ids != 0) | (kinds == EventKind.TEMPLATE))
        if not len(positions):
            return records
        parts: list[Records] = []
        begin = 0
        for position in positions.tolist():
            if kinds[position] == EventKind.TEMPLATE:
                parts.append(records[begin:position])
                self._apply(records, position, coverage)
            else:
                launch = records[position]
                parts += [
                    records[begin : position + 1],
                    self._accesses_of(launch, int(template_ids[position]), coverage),
                ]
            begin = position + 1
        parts.append(records[begin:])
        return concatenate_records(parts)

    def mark(self, races: Iterable[Race]) -> list[Race]:
        """Return races whose operations state whether their accesses are from a template."""
        return [
            replace(race, current=self._marked(race.current), previous=self._marked(race.previous))
            for race in races
        ]

    def _apply(self, records: Records, position: int, coverage: Coverage) -> None:
        """Apply a Template record: keep the accesses of its call, or forget all templates."""
        template = view(records[position : position + 1], EventKind.TEMPLATE)[0]
        check, template_id = TemplateCheck(int(template["check"])), int(template["template_id"])
        if check is not TemplateCheck.NONE:
            coverage.template_checks += 1
            coverage.template_differences += check is TemplateCheck.DIFFERENT
        if template_id:
            self._accesses[template_id] = _accesses_of_call(records, position)
        elif check is TemplateCheck.NONE:
            self._accesses.clear()

    def _accesses_of(self, launch: np.void, template_id: int, coverage: Coverage) -> Records:
        """Return the accesses of a launch: those of its template, with the fields of its call."""
        template = self._accesses.get(template_id)
        if template is None:
            self.unknown_count += 1
            return np.zeros(0, RECORD)
        coverage.launches_from_template += 1
        self._set_from_template(int(launch["seq"]))
        accesses = template.copy()
        for name in _CALL_FIELDS:
            accesses[name] = launch[name]
        return accesses

    def _set_from_template(self, seq: int) -> None:
        index = seq >> 3
        if index >= len(self._is_from_template):
            self._is_from_template.extend(bytes(max(index + 1, 1024)))
        self._is_from_template[index] |= 1 << (seq & 7)

    def _marked(self, operation: Operation) -> Operation:
        index = operation.seq >> 3
        is_from_template = (
            operation.kind == EventKind.LAUNCH
            and index < len(self._is_from_template)
            and bool(self._is_from_template[index] >> (operation.seq & 7) & 1)
        )
        return replace(operation, from_template=True) if is_from_template else operation


def _template_ids(records: Records, kinds: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    """Return the template of each launch, and 0 for other records."""
    template_ids = np.zeros(len(records), np.uint32)
    for kind in (EventKind.LAUNCH, EventKind.GRAPH_LAUNCH):
        is_kind = kinds == kind
        template_ids[is_kind] = view(records[is_kind], kind)["template_id"]
    return template_ids


def _accesses_of_call(records: Records, position: int) -> Records:
    """Return the recorded accesses of the call that a record belongs to, and their Accessed records."""
    seqs = records["seq"]
    seq = seqs[position]
    begin, end = np.searchsorted(seqs, [seq, seq + np.uint64(1)])
    of_call = records[begin:end]
    is_recorded = of_call["kind"] == EventKind.ACCESSED
    is_access = of_call["kind"] == EventKind.ACCESS
    precisions = view(of_call[is_access], EventKind.ACCESS)["precision"]
    is_recorded[is_access] = precisions < Precision.ASSUMED
    accesses: Records = of_call[is_recorded].copy()
    return accesses
