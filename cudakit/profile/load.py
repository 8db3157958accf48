"""Read profiles: saved results (``cudakit.profile/1``) and logs of ``run --profile --log``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from cudakit.errors import InputError
from cudakit.input_files import ExpectedFile, check_schema, read_error, read_json
from cudakit.profile.activities import Activities, ActivityCollector
from cudakit.profile.result import (
    Collective,
    Copies,
    HostWait,
    Kernel,
    ProfileResult,
)
from cudakit.report.document import Frame
from cudakit.serialize import Mismatch, from_plain
from cudakit.trace.kinds import EventKind
from cudakit.trace.run_log import LogReader, Outcome

# Kinds of events that only a log of run --sanitize has.
_SANITIZE_KINDS: Final = (EventKind.LAUNCH, EventKind.COPY, EventKind.FILL, EventKind.GRAPH_LAUNCH)
_PROFILE_FILE: Final = ExpectedFile(
    "a profile", "write a profile with: cudakit run --profile --log profile.log PROGRAM"
)


@dataclass(frozen=True, slots=True)
class RecordedProfile:
    """The activities of a log, and the outcome of its run."""

    activities: tuple[Activities, ...]
    outcome: Outcome


def is_saved_result(path: Path) -> bool:
    """Return whether a file begins as JSON. Raises InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"["))
    except OSError as error:
        raise read_error(path, error) from None


def load_log(
    path: Path, progress: Callable[[str, float], None] = lambda _stage, _fraction: None
) -> RecordedProfile:
    """Read a log. Raises InputError if it is damaged or has no profile."""
    collector = ActivityCollector()
    has_launches = False
    with LogReader(path, _PROFILE_FILE) as log:
        for batch in log.batches():
            collector.add(batch)
            has_launches |= bool(np.isin(batch.records["kind"], _SANITIZE_KINDS).any())
            progress("reading the log", log.fraction)
    activities = tuple(collector.activities())
    if has_launches and not any(process_activities.has_work for process_activities in activities):
        raise InputError(
            f"{path} was written by run --sanitize, so it has no times for a profile",
            hint=f"find its races with: cudakit sanitize {path}",
        )
    return RecordedProfile(activities, log.outcome)


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
