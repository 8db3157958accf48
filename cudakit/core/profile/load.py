"""Read profiles: saved results (``cudakit.profile/1``) and logs of ``run --profile --log``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from cudakit.core.profile.activities import Activities, ActivityCollector
from cudakit.core.profile.result import (
    Collective,
    Copies,
    HostWait,
    Kernel,
    ProfileResult,
)
from cudakit.document import Frame
from cudakit.errors import InputError, read_error
from cudakit.serialize import Mismatch, from_plain
from cudakit.trace.kinds import EventKind
from cudakit.trace.run_log import LogReader, Outcome
from cudakit.units import format_bytes

# The size limit stops reading of endless files such as /dev/zero; results are far smaller.
_MAX_BYTES: Final = 256 << 20
# Kinds of events that only a log of run --sanitize has.
_SANITIZE_KINDS: Final = (EventKind.LAUNCH, EventKind.COPY, EventKind.FILL, EventKind.GRAPH_LAUNCH)
_HINT: Final = "save a profile with: cudakit run --profile -o profile.json PROGRAM"


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
    with LogReader(path) as log:
        for batch in log.batches():
            collector.add(batch)
            has_launches |= bool(np.isin(batch.records["kind"], _SANITIZE_KINDS).any())
            progress("reading the log", log.fraction)
    activities = tuple(collector.activities())
    if has_launches and not any(process.has_work for process in activities):
        raise InputError(
            f"{path} was written by run --sanitize, so it has no times for a profile",
            hint=f"find its races with: cudakit sanitize {path}",
        )
    return RecordedProfile(activities, log.outcome)


def load_result(path: Path) -> ProfileResult:
    """Read a saved result. Raises InputError if it is damaged, or has another schema."""
    document = _read_json(path)
    if not isinstance(document, dict):
        raise InputError(f"{path} contains no profile", hint=_HINT)
    schema = document.get("schema")
    if schema != ProfileResult.schema:
        schema_text = "no schema" if schema is None else f"the schema {str(schema)[:60]!r}"
        raise InputError(f"{path} has {schema_text}; expected {ProfileResult.schema!r}", hint=_HINT)
    try:
        result = from_plain(ProfileResult, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=_HINT) from None
    if contradiction := _contradiction(result):
        raise InputError(f"{path} is damaged: {contradiction}", hint=_HINT)
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


def _read_json(path: Path) -> object:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise read_error(path, error) from None
    if len(content) > _MAX_BYTES:
        raise InputError(f"{path} is larger than {format_bytes(_MAX_BYTES)}", hint=_HINT)
    try:
        return json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})",
            hint=_HINT,
        ) from None
    except (ValueError, RecursionError):
        raise InputError(f"{path} is not a profile: its JSON cannot be read", hint=_HINT) from None
