"""Remove the names and numbers that identify a person, a host or a GPU from a report."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

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
    redacted_value: _T = _replace_secret_patterns(value, tuple(_secret_patterns(identity)))
    return redacted_value


def _secret_patterns(identity: Identity) -> Iterator[tuple[re.Pattern[str], str]]:
    if len(identity.home) > 1:
        yield re.compile(rf"{re.escape(identity.home)}(?![\w.-])"), "~"
    yield _HOME_DIRECTORY, r"/\1/<user>"
    for serial in identity.serials:
        if len(serial) >= _MIN_SERIAL_LENGTH:
            yield _word_pattern(serial), "<serial>"
    short_hostname = identity.hostname.partition(".")[0]
    for name, placeholder in (
        (identity.hostname, "host"),
        (short_hostname, "host"),
        (identity.user, "user"),
    ):
        if name.lower() not in _COMMON_NAMES:
            yield _word_pattern(name), f"<{placeholder}>"
    yield _DEVICE_UUID, r"\1-<uuid>"
    yield _UUID, "<uuid>"


def _word_pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE)


def _replace_secret_patterns(value: Any, patterns: tuple[tuple[re.Pattern[str], str], ...]) -> Any:
    match value:
        case Enum():
            return value
        case str():
            for pattern, placeholder in patterns:
                value = pattern.sub(placeholder, value)
            return value
        case tuple():
            return tuple(_replace_secret_patterns(item, patterns) for item in value)
        case Mapping():
            return {
                _replace_secret_patterns(key, patterns): _replace_secret_patterns(item, patterns)
                for key, item in value.items()
            }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        redacted_fields = {
            field.name: _replace_secret_patterns(getattr(value, field.name), patterns)
            for field in fields
        }
        return dataclasses.replace(value, **redacted_fields)
    return value
