"""Format the result of doctor as a Document: problems first, then a summary."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Any, Literal, TypeVar

from cudakit.devices.doctor.check import (
    CheckResult,
    DoctorResult,
    SetVariable,
    Status,
    count_of,
)
from cudakit.devices.doctor.checks import SELF_TEST
from cudakit.report.document import (
    Bytes,
    Column,
    Count,
    Document,
    Facts,
    Node,
    Note,
    Section,
    Table,
    Text,
)
from cudakit.units import Unavailable, capitalized

_NOTE_LEVELS: dict[Status, Literal["ok", "info", "warn", "error"]] = {
    Status.OK: "ok",
    Status.UNKNOWN: "info",
    Status.WARN: "warn",
    Status.FAIL: "error",
}
# Labels of evidence that is named by the source of libraries (CK012).
_EVIDENCE_LABELS: dict[str, str] = {
    "package": "in Python packages",
    "LD_LIBRARY_PATH": "in LD_LIBRARY_PATH",
    "system": "in the loader's directories",
    "toolkit": "in a CUDA toolkit",
}


def report(
    result: DoctorResult, *, show_all: bool = False, has_selection: bool = False
) -> Document:
    """Return the problems and a summary. With ``show_all``, also return every other check by theme.

    ``has_selection`` is true if the user selected checks by id. Then every check is shown, with the reason if
    it could not be performed.
    """
    nodes: list[Node] = [*_simulation_note(result)]
    nodes += [node for check in _problems(result) for node in _problem_nodes(check)]
    if show_all or has_selection:
        # A section for each theme: a line per passed check, and a line per reason for unknown checks.
        for theme, checks_of_theme in groupby(result.checks, key=lambda check: check.theme):
            checks = [check for check in checks_of_theme if check.status < Status.WARN]
            passed = [check for check in checks if check.status is Status.OK]
            notes = [Note("ok", f"{check.id} {check.summary}") for check in passed]
            if checks:
                nodes.append(Section(theme, (*notes, *_unknown_check_notes(checks))))
    if show_all:
        nodes += _variables_section(result.variables)
    elif result.variables:
        names = ", ".join(variable.name for variable in result.variables)
        noun = count_of(len(result.variables), "environment variable")
        verb = "is" if len(result.variables) == 1 else "are"
        nodes.append(Note("info", f"{noun} for CUDA programs {verb} set: {names}"))
    if not (show_all or has_selection):
        # The reason why no check of the self-test was performed, if --deep requested them.
        nodes += _unknown_check_notes(_unperformed_self_test(result))
    summary = _summary(result, show_all=show_all or has_selection)
    has_sections = any(isinstance(node, Section) for node in nodes)
    return Document(
        _title(result), (*nodes, Section("Summary", (summary,)) if has_sections else summary)
    )


def paste_report(result: DoctorResult) -> Document:
    """Return the report of ``--report``, for issues: versions, devices, every check with its evidence."""
    versions = Facts(tuple((label, Text(version)) for label, version in result.about.items()))
    passed_checks = [check for check in result.checks if check.status is Status.OK]
    devices = result.devices
    columns = (
        Column("GPU", "number"),
        Column("name"),
        Column("compute capability"),
        Column("memory", "number"),
        Column("PCI"),
        Column("UUID"),
    )
    rows = tuple(
        (
            Count(device.index),
            _text(device.name),
            _text(device.compute_capability),
            device.memory_bytes
            if isinstance(device.memory_bytes, Unavailable)
            else Bytes(device.memory_bytes),
            _text(device.pci_bus_id),
            _text(device.uuid),
        )
        for device in devices
    )
    sections: tuple[tuple[str, Sequence[Node]], ...] = (
        ("Versions", [versions]),
        ("GPUs", [Table(columns, rows)] if result.devices else []),
        ("Problems", [node for check in _problems(result) for node in _problem_nodes(check)]),
        (
            "Passed",
            [node for check in passed_checks for node in _check_nodes(check, check.evidence)],
        ),
        ("Not performed", list(_unknown_check_notes(result.checks))),
    )
    nodes = [
        *_simulation_note(result),
        *(Section(title, tuple(content)) for title, content in sections if content),
        *_variables_section(result.variables),
        Section("Summary", (_summary(result, show_all=True),)),
    ]
    return Document(_title(result), tuple(nodes))


# --- title and summary -----------------------------------------------------------------------------


def _title(result: DoctorResult) -> str:
    failed, warned = result.failures, result.warnings
    if failed or warned:
        counts = [f"{count_of(failed, 'check')} failed"] if failed else []
        counts += [count_of(warned, "warning")] if warned else []
        verdict = ", ".join(counts)
    else:
        verdict = "no check could be performed" if result.is_unknown else "no problems found"
    if self_test_checks := _unperformed_self_test(result):
        check_ids = dict.fromkeys((self_test_checks[0].id, self_test_checks[-1].id))
        verdict += f", {' to '.join(check_ids)} not performed"
    return f"Simulated: {verdict}" if result.simulated else capitalized(verdict)


def _simulation_note(result: DoctorResult) -> Iterator[Note]:
    """Yield a note for a simulated GPU: this machine itself is not checked."""
    if result.simulated:
        yield Note(
            "info",
            "The machine is simulated too: the packages, environment variables and limits of this machine "
            "are not checked",
        )


def _summary(result: DoctorResult, *, show_all: bool) -> Note:
    """Return the number of checks by status, and advice on the next command."""
    counts = result.counts
    unknown_text = f", {counts['unknown']} not performed" if counts["unknown"] else ""
    summary_text = (
        f"{count_of(len(result.checks), 'check')}: {counts['fail']} failed, "
        f"{count_of(counts['warn'], 'warning')}, {counts['ok']} passed{unknown_text}"
    )
    check_ids = [check.id for check in _problems(result)]
    checks_noun = "this check" if len(check_ids) == 1 else "these checks"
    advice = [f"cudakit explain {' '.join(check_ids)} explains {checks_noun}"] if check_ids else []
    advice += [] if show_all else ["cudakit doctor --all lists every check"]
    return Note(_NOTE_LEVELS[result.status], summary_text, tuple(advice))


# --- checks ----------------------------------------------------------------------------------------


def _problems(result: DoctorResult) -> list[CheckResult]:
    """Return the checks that failed, then those with warnings."""
    problems = [check for check in result.checks if check.status >= Status.WARN]
    return sorted(problems, key=lambda check: -check.status)


def _problem_nodes(check: CheckResult) -> Iterator[Node]:
    """Yield the nodes of a failed check or a warning, with the evidence that is not in its summary."""
    summary, pairs = check.summary, check.evidence.items()
    evidence = {name: text for name, text in pairs if name not in summary or text not in summary}
    return _check_nodes(check, evidence)


def _check_nodes(check: CheckResult, evidence: Mapping[str, str]) -> Iterator[Node]:
    yield Note(_NOTE_LEVELS[check.status], f"{check.id} {check.summary}", check.fix)
    if evidence:
        rows = (
            (_EVIDENCE_LABELS.get(label, label), Text(value)) for label, value in evidence.items()
        )
        yield Facts(tuple(rows))


def _unperformed_self_test(result: DoctorResult) -> list[CheckResult]:
    """Return the checks of the self-test if other checks were performed, but none of the self-test."""
    checks = [check for check in result.checks if check.theme in SELF_TEST]
    was_performed = any(check.status is not Status.UNKNOWN for check in checks)
    return [] if was_performed or result.is_unknown else checks


def _unknown_check_notes(checks: Sequence[CheckResult]) -> Iterator[Node]:
    ids_by_reason: dict[str, list[str]] = {}
    for check in checks:
        if check.status is Status.UNKNOWN:
            ids_by_reason.setdefault(check.summary, []).append(check.id)
    for reason, check_ids in ids_by_reason.items():
        yield Note("info", f"{', '.join(check_ids)} not performed: {reason}")


# --- environment variables and devices -------------------------------------------------------------


def _variables_section(variables: Sequence[SetVariable]) -> Iterator[Node]:
    if variables:
        columns = (Column("variable"), Column("value"), Column("effect"), Column("read by"))
        rows = tuple(
            tuple(map(Text, (variable.name, variable.value, variable.effect, variable.library)))
            for variable in variables
        )
        caption = (
            "Only variables that cudakit knows are listed. cudakit explain VARIABLE shows the effect and its "
            "source."
        )
        yield Section("Environment variables that are set", (Table(columns, rows, caption),))


def _text(value: str | Unavailable) -> Text | Unavailable:
    return value if isinstance(value, Unavailable) else Text(value)


# --- Remove the names and numbers that identify a person, a host or a GPU from a report ------------

_T = TypeVar("_T")

# The UUID of a device, also abbreviated as in CUDA_VISIBLE_DEVICES, or the legacy name of a MIG instance.
_DEVICE_UUID = re.compile(r"\b(MIG-GPU|GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]*(?:/\d+)*")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_HOME_DIRECTORY = re.compile(r"/(home|Users)/[^/\s:,;'\"]+")
# Common names of users and hosts, which stay in the report.
_COMMON_NAMES = frozenset(
    {"", "root", "user", "ubuntu", "nobody", "nvidia", "docker", "localhost", "gpu", "cuda"}
    | {"vm", "pc", "host", "server", "node", "linux", "debian", "fedora", "admin"}
    | {"serial", "uuid", "home"}  # words in the placeholders of a report
)
# Minimum length of a serial number to remove. A shorter one could be a part of other numbers.
_MIN_SERIAL_LENGTH = 6


@dataclass(frozen=True, slots=True)
class Identity:
    """The names and numbers to remove from a report."""

    hostname: str = ""
    user: str = ""
    home: str = ""
    serials: tuple[str, ...] = ()


def redact_value(value: _T, identity: Identity) -> _T:
    """Return a value with placeholders for UUIDs, serial numbers, host, user and home directories.

    The value is a text, or is composed of dataclasses, tuples and mappings.
    """
    patterns = tuple(_secret_patterns(identity))

    def redact(value: Any) -> Any:
        match value:
            case Enum():
                return value
            case str():
                for pattern, placeholder in patterns:
                    value = pattern.sub(placeholder, value)
                return value
            case tuple():
                return tuple(map(redact, value))
            case Mapping():
                return {redact(key): redact(item) for key, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            redacted = {name: redact(getattr(value, name)) for name in names}
            return dataclasses.replace(value, **redacted)
        return value

    redacted_value: _T = redact(value)
    return redacted_value


def _secret_patterns(identity: Identity) -> Iterator[tuple[re.Pattern[str], str]]:
    if len(identity.home) > 1:
        yield re.compile(rf"{re.escape(identity.home)}(?![\w.-])"), "~"
    yield _HOME_DIRECTORY, r"/\1/<user>"
    for serial in identity.serials:
        if len(serial) >= _MIN_SERIAL_LENGTH:
            yield _word_pattern(serial), "<serial>"
    hostname, user = identity.hostname, identity.user
    names = {hostname: "host", hostname.partition(".")[0]: "host"}
    for name, placeholder in (*names.items(), (user, "user")):
        if name.lower() not in _COMMON_NAMES:
            yield _word_pattern(name), f"<{placeholder}>"
    yield _DEVICE_UUID, r"\1-<uuid>"
    yield _UUID, "<uuid>"


def _word_pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE)
