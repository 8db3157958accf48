"""Remove from a report what identifies a person, a host or a piece of hardware."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

_T = TypeVar("_T")

# UUIDs, also abbreviated as in CUDA_VISIBLE_DEVICES, and the legacy form of MIG instances.
_DEVICE = re.compile(r"\b(MIG-GPU|GPU|MIG)-[0-9a-fA-F][0-9a-fA-F-]*(?:/\d+)*")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_HOMES = re.compile(r"/(home|Users)/[^/\s:,;'\"]+")
# Names of users and hosts that identify nobody.
_ANONYMOUS = frozenset(
    {"", "root", "user", "ubuntu", "nobody", "nvidia", "docker", "localhost", "gpu", "cuda"}
    | {"vm", "pc", "host", "server", "node", "linux", "debian", "fedora", "admin"}
    | {"serial", "uuid", "home"}  # the placeholders
)
# A shorter serial number would match unrelated numbers.
_LEAST_SERIAL = 6


@dataclass(frozen=True, slots=True)
class Identity:
    """The names and numbers to remove."""

    hostname: str = ""
    user: str = ""
    home: str = ""
    serials: tuple[str, ...] = ()


def redacted(value: _T, identity: Identity) -> _T:
    """Replace UUIDs, serial numbers, host, user and home directories in all texts of a value.

    The value is a text, or consists of dataclasses, tuples and mappings.
    """
    result: _T = _redacted(value, tuple(_secrets(identity)))
    return result


def _secrets(identity: Identity) -> Iterator[tuple[re.Pattern[str], str]]:
    if len(identity.home) > 1:
        yield re.compile(rf"{re.escape(identity.home)}(?![\w.-])"), "~"
    yield _HOMES, r"/\1/<user>"
    for serial in identity.serials:
        if len(serial) >= _LEAST_SERIAL:
            yield _word(serial), "<serial>"
    short = identity.hostname.partition(".")[0]
    for name, mark in ((identity.hostname, "host"), (short, "host"), (identity.user, "user")):
        if name.lower() not in _ANONYMOUS:
            yield _word(name), f"<{mark}>"
    yield _DEVICE, r"\1-<uuid>"
    yield _UUID, "<uuid>"


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", re.IGNORECASE)


def _redacted(value: Any, secrets: tuple[tuple[re.Pattern[str], str], ...]) -> Any:
    match value:
        case Enum():
            return value
        case str():
            for pattern, mark in secrets:
                value = pattern.sub(mark, value)
            return value
        case tuple():
            return tuple(_redacted(item, secrets) for item in value)
        case Mapping():
            return {
                _redacted(key, secrets): _redacted(item, secrets) for key, item in value.items()
            }
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        changed = {one.name: _redacted(getattr(value, one.name), secrets) for one in fields}
        return dataclasses.replace(value, **changed)
    return value
