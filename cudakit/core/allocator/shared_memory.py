"""Memory that is shared with other processes, as a value that is sent to them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from cudakit.errors import InputError
from cudakit.gpu.api import HANDLE_BYTES, Descriptor, Fabric, ProcessId

SCHEMA = "cudakit.shared/1"

# A segment of cuMemAlloc, by its CUipcMemHandle, or a page of one that expands.
Handle: TypeAlias = bytes | Fabric | Descriptor

_BEYOND = 1 << 63  # any size or address
_PIDS = 1 << 31  # a pid_t is an int

_KIND = re.compile(r"([a-z]+):([0-9a-f]+)(?::([0-9]{1,19}))?")


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Part of an allocation, for other processes of the machine to open; can be pickled, and written as text.

    It says where the memory is, and keeps it neither allocated nor its process alive. What lies beside it in
    the same segment or pages can be reached with it too: send it to nobody who must not read that.
    """

    size_bytes: int  # from the address that was shared to the end of what was asked for
    offset_bytes: int  # from the beginning of what is opened
    device: str  # its UUID
    process: ProcessId  # which shares it
    page_bytes: int  # of each handle; 0: there is one, of a whole segment
    handles: tuple[Handle, ...]  # of the pages in the order of their addresses

    def as_text(self) -> str:
        """Write it as JSON, which ``from_text`` reads."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "size_bytes": self.size_bytes,
                "offset_bytes": self.offset_bytes,
                "device": self.device,
                "pid": self.process.pid,
                "started": self.process.started,
                "page_bytes": self.page_bytes,
                "handles": [_written(handle) for handle in self.handles],
            }
        )

    @classmethod
    def from_text(cls, text: str) -> SharedMemory:
        """Read what ``as_text`` wrote. Raises InputError for anything else, and for another version."""
        form = _Form(text)
        process = ProcessId(form.number("pid", _PIDS), form.number("started"))
        shared = cls(
            form.number("size_bytes"),
            form.number("offset_bytes"),
            form.text("device"),
            process,
            form.number("page_bytes"),
            tuple(_read(each, process) for each in form.texts("handles")),
        )
        shared._check()
        return shared

    def __reduce__(self) -> tuple[Callable[[str], SharedMemory], tuple[str]]:
        return SharedMemory.from_text, (self.as_text(),)

    def _check(self) -> None:
        """Refuse what no allocator shares."""
        kinds = {type(handle) for handle in self.handles}
        if self.page_bytes:
            opened_bytes = len(self.handles) * self.page_bytes
            fits = self.offset_bytes + self.size_bytes <= opened_bytes < _BEYOND
            right = fits and len(kinds) == 1 and bytes not in kinds
        else:
            right = kinds == {bytes} and len(self.handles) == 1
        if not right or not self.size_bytes:
            kind = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise _refused("handles", f"{len(self.handles)} ({kind}) for {self.size_bytes} bytes")


class _Form:
    """The fields of the text, each of which is what it should be."""

    def __init__(self, text: str) -> None:
        try:
            fields = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"not a text of shared memory: {text!r:.60}") from error
        schema = fields.get("schema") if isinstance(fields, dict) else None
        if schema != SCHEMA:
            raise InputError(
                f"shared memory of the form {schema!r}, and this cudakit reads {SCHEMA!r}",
                hint="use the same version of cudakit in both processes",
            )
        self._fields = fields

    def number(self, name: str, beyond: int = _BEYOND) -> int:
        value = self._fields.get(name)
        if type(value) is not int or not 0 <= value < beyond:
            raise _refused(name, value)
        return value

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise _refused(name, value)
        return value

    def texts(self, name: str) -> list[str]:
        value = self._fields.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _refused(name, value)
        return value


def _written(handle: Handle) -> str:
    match handle:
        case Descriptor():
            return f"fd:{handle.number:x}:{handle.serial}"
        case Fabric():
            return f"fabric:{handle.data.hex()}"
        case _:
            return f"ipc:{handle.hex()}"


def _read(text: str, process: ProcessId) -> Handle:
    found = _KIND.fullmatch(text)
    if found is None:
        raise _refused("handles", text)
    kind, digits, serial = found.groups()
    if kind == "fd" and serial and len(digits) <= 8:
        return Descriptor(process, int(digits, 16), int(serial))
    if serial or len(digits) != 2 * HANDLE_BYTES or kind not in ("ipc", "fabric"):
        raise _refused("handles", text)
    return bytes.fromhex(digits) if kind == "ipc" else Fabric(bytes.fromhex(digits))


def _refused(name: str, value: Any) -> InputError:
    return InputError(f"no shared memory has {name} {value!r:.60}", hint="send it unchanged")
