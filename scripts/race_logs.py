"""Small logs of recorded programs, without data that differs between machines and runs.

A log is a .npz file with the records and the tables of each process. Call stacks keep only frames of the
program itself, the string table only strings that records refer to. Times are removed, and threads are
numbered from 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cudakit.core.sanitize.detector import RaceDetector
from cudakit.core.sanitize.report import Report
from cudakit.core.sanitize.result import SanitizeResult
from cudakit.gpu.demangle import demangle
from cudakit.trace.kinds import Kind
from cudakit.trace.layout import RECORD, RECORD_BYTES, Records, view
from cudakit.trace.log import Frame, Stack
from cudakit.trace.spool import Batch

VERSION = 1
MOST_BYTES = 200_000  # of a log in the repository

# The fields of records that refer to the string table.
_NAMES = {
    Kind.LAUNCH: ("name",),
    Kind.GRAPH_NODE: ("name",),
    Kind.RANGE_PUSH: ("name", "domain"),
    Kind.RANGE_POP: ("domain",),
    Kind.MARK: ("name", "domain"),
    Kind.GAP: ("what",),
}


@dataclass(frozen=True, slots=True)
class Chain:
    """The trace of one process."""

    records: Records
    strings: Sequence[str]
    stacks: Sequence[Stack]
    simulated: bool


class Recording:
    """Collects the batches of a run into chains."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._batches: dict[tuple[int, int], list[Batch]] = {}

    def add(self, batch: Batch) -> bool:
        """Add a batch. Return False: the program is never stopped."""
        self._batches.setdefault((batch.process, batch.chain), []).append(batch)
        return False

    def chains(self) -> list[Chain]:
        """Return the chains, without data that differs between machines and runs."""
        return [self._chain(batches) for batches in self._batches.values()]

    def _chain(self, batches: Sequence[Batch]) -> Chain:
        last = batches[-1]  # its tables include those of the others
        records = np.concatenate([batch.records for batch in batches])
        records["time_ns"] = 0
        records["thread"] = np.unique(records["thread"], return_inverse=True)[1] + 1
        named = _named(records)
        strings = [text if number in named else "" for number, text in enumerate(last.strings)]
        return Chain(records, strings, [self._own(stack) for stack in last.stacks], last.simulated)

    def _own(self, stack: Stack) -> Stack:
        return tuple(
            frame._replace(file=self._program)
            for frame in stack
            if Path(frame.file).name == self._program
        )


def save(path: Path, chains: Sequence[Chain]) -> None:
    """Write a log."""
    tables = [
        {"strings": chain.strings, "stacks": chain.stacks, "simulated": chain.simulated}
        for chain in chains
    ]
    header = json.dumps({"version": VERSION, "chains": tables}).encode()
    # Transposed: the bytes at one offset of consecutive records are similar, and compress well.
    columns = {
        f"records{number}": chain.records.view(np.uint8).reshape(-1, RECORD_BYTES).T
        for number, chain in enumerate(chains)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, tables=np.frombuffer(header, np.uint8), **columns)


def load(path: Path) -> list[Chain]:
    """Read a log. Raises ValueError if it has another version."""
    with np.load(path) as file:
        header: Mapping[str, Any] = json.loads(file["tables"].tobytes())
        if header["version"] != VERSION:
            raise ValueError(f"{path} is a log of version {header['version']}, not {VERSION}")
        return [
            Chain(
                np.ascontiguousarray(file[f"records{number}"].T).reshape(-1).view(RECORD),
                table["strings"],
                [tuple(Frame(*frame) for frame in stack) for stack in table["stacks"]],
                table["simulated"],
            )
            for number, table in enumerate(header["chains"])
        ]


def analyzed(
    chains: Sequence[Chain], *, exit_status: int = 0, notes: Sequence[str] = ()
) -> SanitizeResult:
    """Find the races in a log, as ``cudakit run --sanitize`` does during a run."""
    detector, report = RaceDetector(), Report(demangle=demangle)
    for process, chain in enumerate(chains, start=1):
        batch = Batch(
            process, chain.records, chain.strings, chain.stacks, simulated=chain.simulated
        )
        detector.feed(batch, report)
    detector.finish(report)
    return detector.result(report, exit_status=exit_status, notes=notes)


def _named(records: Records) -> set[int]:
    return {number for kind, fields in _NAMES.items() for number in _numbers(records, kind, fields)}


def _numbers(records: Records, kind: Kind, fields: Sequence[str]) -> Iterator[int]:
    some = view(records[records["kind"] == kind], kind)
    for field in fields:
        yield from np.unique(some[field]).tolist()
