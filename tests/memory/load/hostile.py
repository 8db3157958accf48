"""Hostile files: they run code, fill memory, or take a long time if read carelessly."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memory.load.files import (
    LARGE,
    MIB,
    block,
    event,
    frame,
    pickled,
    segment,
    snapshot,
    zstd,
)

_MILLION = 1_000_000


class _Call:
    """An object that is pickled as a call of os.system."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def _text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def callers(canary: Path) -> Iterator[tuple[str, bytes]]:
    """Yield pickles that create a file named canary if pickle.load reads them."""
    command = f"touch {canary}"
    call, words = _Call(command), _text(command)
    yield "GLOBAL", b"\x80\x02cos\nsystem\n" + words + b"\x85R."
    yield "GLOBAL in protocol 0", b"cos\nsystem\n(S'" + command.encode() + b"'\ntR."
    yield "STACK_GLOBAL", b"\x80\x04" + _text("os") + _text("system") + b"\x93" + words + b"\x85R."
    yield "INST", b"\x80\x02(" + words + b"ios\nsystem\n."
    yield "OBJ", b"\x80\x02(cos\nsystem\n" + words + b"o."
    for protocol in range(6):
        yield f"a call, protocol {protocol}", pickled(call, protocol)
        yield f"in a trace, protocol {protocol}", pickled({"device_traces": [[call]]}, protocol)
    yield "in the settings", pickled(snapshot() | {"allocator_settings": call})
    yield "under an unknown key", pickled(snapshot() | {"other": [[call]]})
    yield "as a key", pickled({"segments": [], call: 1})
    yield (
        "popped from the stack",
        b"\x80\x04" + pickled(call)[2:-1] + b"0" + pickled(snapshot())[2:],
    )


# Opcodes that create or call objects, which a snapshot does not contain.
OPCODES = {
    "GLOBAL": b"\x80\x02cbuiltins\ndict\n.",
    "STACK_GLOBAL": b"\x80\x04" + _text("builtins") + _text("dict") + b"\x93.",
    "REDUCE": b"\x80\x02})R.",
    "BUILD": b"\x80\x02}}b.",
    "INST": b"\x80\x02(ibuiltins\ndict\n.",
    "OBJ": b"\x80\x02(}o.",
    "NEWOBJ": b"\x80\x02})\x81.",
    "NEWOBJ_EX": b"\x80\x04})}\x92.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x01.",
    "EXT4": b"\x80\x02\x84\x01\x01\x01\x01.",
    "PERSID": b"\x80\x02P1\n.",
    "BINPERSID": b"\x80\x02}Q.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "EMPTY_SET": b"\x80\x04\x8f.",
}


def heavy() -> Iterator[tuple[str, bytes]]:
    """Yield small files that declare or expand to a large size."""
    yield "lists in lists", b"\x80\x04" + b"]" * _MILLION + b"a" * (_MILLION - 1) + b"."
    yield "tuples in tuples", b"\x80\x04)" + b"\x85" * _MILLION + b"."
    yield "marks", b"\x80\x04" + b"(" * _MILLION + b"."
    yield "copies", b"\x80\x04}" + b"2" * _MILLION + b"."
    for opcode, width in (
        (b"X", 4),
        (b"B", 4),
        (b"T", 4),
        (b"\x8d", 8),
        (b"\x8e", 8),
        (b"\x96", 8),
    ):
        most = (1 << (8 * width - 1)) - 1
        yield f"a length under {opcode!r}", b"\x80\x05" + opcode + most.to_bytes(width, "little")
    yield "a number of 2 GiB", b"\x80\x02\x8b\xff\xff\xff\x7f"
    yield "a number of negative length", b"\x80\x02\x8b\xff\xff\xff\xff."
    yield "a number of a million digits", b"(I" + b"9" * _MILLION + b"\nl."
    yield (
        "a number of a million bytes",
        b"\x80\x02\x8b" + struct.pack("<I", _MILLION) + bytes(_MILLION) + b".",
    )
    yield "a frame", b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f."
    yield "a memo index", b"\x80\x02}r" + struct.pack("<I", 200_000_000) + b"."
    yield "a memo index in text", b"(dp" + b"9" * 18 + b"\n."
    yield "a memo that is empty", b"\x80\x02j" + struct.pack("<I", 200_000_000) + b"."
    yield "JSON lists", b"[" * 100_000
    yield "JSON dictionaries", b'{"a":' * 100_000
    yield "a JSON number", b"[" + b"9" * _MILLION + b"]"
    # 1 GiB each.
    yield "gzip", gzip.compress(bytes(16 * MIB)) * 64
    yield "Zstandard", zstd.compress(bytes(16 * MIB)) * 64
    yield "lists in gzip", gzip.compress(b"\x80\x04" + b"]" * (16 * MIB))
    yield from _sharing()


def _sharing() -> Iterator[tuple[str, bytes]]:
    entry = event("alloc", LARGE, 512)
    yield "one trace for many devices", pickled({"device_traces": [[entry]] * 100_000})
    yield "one long trace for all devices", pickled({"device_traces": [[entry] * 1000] * 128})
    stacks = [[frame("f")] * 1000 for _ in range(1000)]
    trace = [event("alloc", LARGE, 512, frames=stack) for stack in stacks]
    yield "one frame in many stacks", pickled({"device_traces": [trace]})
    yield (
        "stacks in stacks",
        pickled({"device_traces": [[event("alloc", LARGE, 512, frames=stacks)]]}),
    )
    name = frame("x" * MIB)
    long = [event("alloc", LARGE, 512, frames=[name] * n) for n in range(300)]
    yield "one long name in many stacks", pickled({"device_traces": [long]})
    piece = block(LARGE, 1, 1, "inactive")
    yield "one segment many times", pickled([segment(LARGE, MIB, [piece] * 1000)] * 1000)
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    for key in ("allocator_settings", "segments", "device_traces", "external_annotations"):
        yield f"doubling in {key}", pickled(snapshot(**{key: nested}))
    yield (
        "doubling in frames",
        pickled({"device_traces": [[event("alloc", LARGE, 1, frames=nested)]]}),
    )
