"""Collect the events of a profile, one table of columns for each kind; read saved profiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from cudakit.errors import InputError
from cudakit.input_files import ExpectedFile, check_schema, read_error, read_json
from cudakit.profile.result import Collective, Copies, HostWait, Kernel, ProfileResult
from cudakit.serialize import Mismatch, from_plain
from cudakit.stacks import Frame, Stack
from cudakit.trace.kinds import EventKind
from cudakit.trace.run_log import LogReader, Outcome
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, layout

# Kinds of events that make up a profile.
_PROFILE_EVENT_KINDS = (
    EventKind.API_CALL,
    EventKind.KERNEL_RUN,
    EventKind.COPY_RUN,
    EventKind.FILL_RUN,
    EventKind.GRAPH_NODE_SITE,
    EventKind.PROFILE_WINDOW,
    EventKind.DEVICE_INFO,
    EventKind.RANGE_PUSH,
    EventKind.RANGE_POP,
    EventKind.MARK,
    EventKind.GAP,
    EventKind.COMMUNICATOR,
    EventKind.COLLECTIVE,
)
# Kinds of events that are work of a GPU.
_GPU_WORK = (EventKind.KERNEL_RUN, EventKind.COPY_RUN, EventKind.FILL_RUN)
# The fields of each kind that are indices of the string table.
_TEXT_FIELDS: dict[EventKind, tuple[str, ...]] = {
    EventKind.API_CALL: ("function",),
    EventKind.KERNEL_RUN: ("name",),
    EventKind.DEVICE_INFO: ("name",),
    EventKind.RANGE_PUSH: ("name", "domain"),
    EventKind.RANGE_POP: ("domain",),
    EventKind.MARK: ("name", "domain"),
    EventKind.GAP: ("reason",),
    EventKind.COMMUNICATOR: ("name",),
}


@dataclass(frozen=True, slots=True)
class Activities:
    """The activities of one process, as numpy records in the order of the trace (``trace_file.layout``).

    Text fields are indices of ``strings``; ``site`` is an index of ``stacks``, where 0 is the empty stack.
    Records of CUPTI arrive in buffers, so rows are not sorted by time. The site of a kernel, copy or
    memset is that of the API call with the same correlation, or of its graph node.
    """

    process: int
    simulated: bool
    strings: Sequence[str]
    stacks: Sequence[Stack]
    records: dict[EventKind, Records]

    @property
    def rank(self) -> int | None:
        """The rank of the process in a job, as of torchrun, or None if it is unknown."""
        ranks = self.records[EventKind.PROFILE_WINDOW]["rank"]
        return int(ranks[0]) if len(ranks) and ranks[0] >= 0 else None

    @property
    def has_work(self) -> bool:
        """Whether a kernel, copy or memset of the process ran on a device."""
        return any(len(self.records[kind]) for kind in _GPU_WORK)

    @property
    def has_cuda_calls(self) -> bool:
        """Whether the process called CUDA while it was profiled."""
        return bool(len(self.records[EventKind.API_CALL]))


class _Process:
    """The records of one process, and the strings and stacks of all of its traces, each stored once."""

    def __init__(self) -> None:
        self.simulated = False
        self.chunks: dict[EventKind, list[Records]] = {kind: [] for kind in _PROFILE_EVENT_KINDS}
        self.strings: dict[str, int] = {}
        self.stacks: dict[Stack, int] = {(): 0}
        # For each trace, the indices of its strings and of its stacks in these tables, by the number of
        # the trace.
        self.string_indices: dict[int, _Index] = {}
        self.stack_indices: dict[int, _Index] = {}

    def add(self, batch: Batch) -> None:
        self.simulated |= batch.simulated
        trace = batch.trace_number
        strings = _extend_indices(self.string_indices, trace, batch.strings, self.strings)
        sites = _extend_indices(self.stack_indices, trace, batch.stacks, self.stacks)
        kinds = batch.records["kind"]
        for kind, chunks in self.chunks.items():
            is_kind = kinds == kind
            if not is_kind.any():
                continue
            rows = batch.records[is_kind].view(layout(kind))
            rows["site"] = sites[rows["site"]]
            for name in _TEXT_FIELDS.get(kind, ()):
                rows[name] = strings[rows[name]]
            chunks.append(rows)


class ActivityCollector:
    """Collects the batches of records of all processes."""

    def __init__(self) -> None:
        self._processes: defaultdict[int, _Process] = defaultdict(_Process)

    def add(self, batch: Batch) -> None:
        """Keep the records of a batch that belong to a profile."""
        self._processes[batch.process].add(batch)

    def activities(self) -> list[Activities]:
        """Return the activities of each process, in the order of their PIDs."""
        return [
            Activities(
                number,
                process.simulated,
                tuple(process.strings),
                tuple(process.stacks),
                {
                    kind: np.concatenate(chunks) if chunks else np.empty(0, layout(kind))
                    for kind, chunks in process.chunks.items()
                },
            )
            for number, process in sorted(self._processes.items())
        ]


_Index = npt.NDArray[np.uint32]
_Item = TypeVar("_Item", str, Stack)


def _extend_indices(
    indices_of_trace: dict[int, _Index],
    trace_number: int,
    items: Sequence[_Item],
    index_by_item: dict[_Item, int],
) -> _Index:
    """Return the index of each string or stack of a trace; only new strings and stacks are looked up."""
    indices = indices_of_trace.get(trace_number, np.empty(0, np.uint32))
    if len(items) > len(indices):
        new_indices = [
            index_by_item.setdefault(item, len(index_by_item)) for item in items[len(indices) :]
        ]
        indices = np.concatenate([indices, np.array(new_indices, np.uint32)])
        indices_of_trace[trace_number] = indices
    return indices


# --- reading logs and saved results ----------------------------------------------------------------

# Kinds of events that only a log of run --sanitize has.
_SANITIZE_KINDS: Final = (EventKind.LAUNCH, EventKind.COPY, EventKind.FILL, EventKind.GRAPH_LAUNCH)
_PROFILE_FILE: Final = ExpectedFile(
    "a profile", "write a profile with: cudakit run --profile --log profile.log PROGRAM"
)


def is_saved_result(path: Path) -> bool:
    """Return whether a file begins as JSON. Raises InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"["))
    except OSError as error:
        raise read_error(path, error) from None


def load_log(
    path: Path, progress: Callable[[str, float], None] = lambda _stage, _fraction: None
) -> tuple[Sequence[Activities], Outcome]:
    """Return the activities of a log, and the outcome of its run.

    Raises InputError if the log is damaged or has no profile.
    """
    collector = ActivityCollector()
    has_launches = False
    with LogReader(path, _PROFILE_FILE) as log:
        for batch in log.batches():
            collector.add(batch)
            has_launches |= bool(np.isin(batch.records["kind"], _SANITIZE_KINDS).any())
            progress("reading the log", log.fraction)
    activities = collector.activities()
    if has_launches and not any(process_activities.has_work for process_activities in activities):
        raise InputError(
            f"{path} was written by run --sanitize, so it has no times for a profile",
            hint=f"find its races with: cudakit sanitize {path}",
        )
    return activities, log.outcome


def load_result(path: Path) -> ProfileResult:
    """Read a saved result. Raises InputError if it is damaged, or has another schema."""
    document = read_json(path, _PROFILE_FILE)
    document = check_schema(path, document, ProfileResult.schema, _PROFILE_FILE)
    try:
        result = from_plain(ProfileResult, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=_PROFILE_FILE.hint) from None
    if contradiction := _contradiction(result):
        raise InputError(f"{path} is damaged: {contradiction}", hint=_PROFILE_FILE.hint)
    return result


def _contradiction(result: ProfileResult) -> str:
    """Return a sentence on two parts of a result that contradict each other, or an empty text."""
    devices = {(device.process, device.device) for device in result.devices}
    for index, finding in enumerate(result.findings):
        if (finding.process, finding.device) not in devices:
            return f"findings[{index}] is of a device that is not in devices"
        if not _has_site(finding.stack, finding.site):
            return f"findings[{index}].site is not in its stack"
    for index, device in enumerate(result.devices):
        if not 0 <= device.steps.warm_up <= len(device.steps.steps):
            return f"devices[{index}].steps.warm_up is not the number of some steps"
        rows: tuple[Kernel | Copies | Collective | HostWait, ...] = (
            *device.kernels,
            *device.copies,
            *device.collectives,
            *device.waits,
        )
        if not all(_has_site(row.stack, row.site) for row in rows):
            return f"devices[{index}] has a site that is not in its stack"
    return ""


def _has_site(stack: Sequence[Frame], site: int) -> bool:
    """Return whether a call site is the index of a frame; the call site of an empty stack is 0."""
    return 0 <= site < max(len(stack), 1)
