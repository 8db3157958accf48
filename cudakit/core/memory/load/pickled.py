"""From the bytes of a pickle to a Tree, without ever looking up a class or calling anything.

Two machines read the same language and refuse the same files: the native one keeps a million
dictionaries in flat memory; the one in Python serves where that was not built.
"""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING, Any

from cudakit.core.memory.load.machine import Machine
from cudakit.core.memory.load.source import HINT_DUMP
from cudakit.core.memory.load.tree import ObjectTree, Tree
from cudakit.errors import SnapshotError

if TYPE_CHECKING:
    from cudakit.core.memory.load.native import NativeTree

_HINT_COPY = "copy the file again, or take the snapshot again"

_CALLS = re.compile(r"(STACK_)?GLOBAL|REDUCE|BUILD|INST|OBJ|NEWOBJ(_EX)?|EXT[124]|(BIN)?PERSID")
_DAMAGES = {
    "stack": "needs more values than the stack has",
    "mark": "needs a MARK, and the stack has none",
    "target": "adds items to a value that cannot hold them",
    "pairs": "has a key without a value",
    "memo": "reads a memo entry that was not stored",
    "far": "stores a memo entry whose index is too large for its position in the file",
    "argument": "has an invalid argument",
    "protocol": "declares a protocol above 5",
}


def read(content: bytes, *, native: bool | None = None) -> Tree:
    """Read a pickle (protocols 0 to 5) of lists, tuples, dictionaries, texts and numbers.

    native chooses the machine; by default it is the native one where that was built. True raises
    ImportError where it was not. The native Tree keeps content alive.

    Raises SnapshotError for a file that is cut, damaged, or holds anything else.
    """
    native_tree = None if native is False else _native_tree(required=native is True)
    try:
        if native_tree is not None:
            return native_tree(content)
        return ObjectTree(_read_objects(content), len(content))
    except ValueError as error:
        raise _explained(content, *error.args) from None


def _native_tree(*, required: bool) -> type[NativeTree] | None:
    try:
        from cudakit.core.memory.load.native import NativeTree
    except ImportError:
        if required:
            raise
        return None
    return NativeTree


def _read_objects(content: bytes) -> Any:
    # A garbage collection would visit every dictionary repeatedly, and there is no garbage.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return Machine(content).run()
    finally:
        if was_enabled:
            gc.enable()


def _explained(content: bytes, why: str, offset: int) -> SnapshotError:
    if why == "cut":
        return SnapshotError(
            f"the file is truncated after {len(content):,} bytes: copying or writing it did not finish",
            hint=_HINT_COPY,
        )
    name = _opcode_name(content[offset])
    if why == "opcode":
        return SnapshotError(f"byte {offset:,}: {_refusal(name)}", hint=HINT_DUMP)
    doubt = "" if content.startswith(b"\x80") else ", or no pickle at all"
    return SnapshotError(
        f"byte {offset:,}: opcode {name} {_DAMAGES[why]}: the file is damaged{doubt}",
        hint=_HINT_COPY if not doubt else HINT_DUMP,
    )


def _opcode_name(opcode: int) -> str:
    # Only errors need this table, which takes milliseconds to build.
    from pickletools import opcodes

    names = {known.code: known.name for known in opcodes}
    return names.get(chr(opcode), f"{opcode:#04x}")


def _refusal(name: str) -> str:
    if _CALLS.fullmatch(name):
        return (
            f"opcode {name} names or calls a class or function; "
            "a memory snapshot holds only plain data, so nothing was loaded"
        )
    if name.startswith("0x"):
        return f"{name} is no opcode: the file is not a pickle, or is damaged"
    return f"opcode {name} makes an object that no memory snapshot holds, so nothing was loaded"
