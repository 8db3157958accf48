"""Parse a pickle into a Tree, without looking up a class or calling anything.

Two machines accept the same files: the compiled one (``reader/*.c``), and a slower one in Python, which is
used if the package was installed without a C compiler.
"""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING, Any

from cudakit.errors import SnapshotError
from cudakit.memory.load.limits import Budget, memory_error
from cudakit.memory.load.machine import Machine
from cudakit.memory.load.source import SNAPSHOT_FILE
from cudakit.memory.load.tree import ObjectTree, Tree

if TYPE_CHECKING:
    from cudakit.memory.load.native import NativeTree

_HINT_COPY = "copy the file again, or take the snapshot again"

_CALLING_OPCODES = re.compile(
    r"(STACK_)?GLOBAL|REDUCE|BUILD|INST|OBJ|NEWOBJ(_EX)?|EXT[124]|(BIN)?PERSID"
)
_DAMAGE_REASONS = {
    "stack": "needs more values than the stack has",
    "mark": "needs a MARK, and the stack has none",
    "target": "adds items to a value that cannot hold them",
    "pairs": "has a key without a value",
    "memo": "reads a memo entry that was not stored",
    "memo_index": "stores a memo entry whose index is too large for its position in the file",
    "argument": "has an invalid argument",
    "protocol": "declares a protocol above 5",
}


def read(content: bytes, budget: Budget | None = None, *, native: bool | None = None) -> Tree:
    """Parse a pickle (protocols 0 to 5) of lists, tuples, dictionaries, texts and numbers.

    ``budget`` is that of the file; None is the budget of an uncompressed file. ``native`` chooses the
    machine: True is the compiled one (raises ImportError if it is missing), False the one in Python, None
    the compiled one if it is installed. Raises SnapshotError if the file is truncated or damaged, or contains
    anything else.
    """
    budget = budget or Budget(len(content), len(content))
    native_tree = None if native is False else _native_tree(is_required=native is True)
    try:
        if native_tree is not None:
            return native_tree(content, budget)
        budget.check_objects(_estimated_object_bytes(content))
        return ObjectTree(_read_objects(content), budget)
    except ValueError as error:
        reason, offset = error.args
        if reason == "memory_limit":
            raise memory_error(budget.tree_bytes) from None
        raise _rejection(content, reason, offset) from None


def has_compiled_reader() -> bool:
    """Return whether the package was installed with the compiled reader."""
    return _native_tree(is_required=False) is not None


def _native_tree(*, is_required: bool) -> type[NativeTree] | None:
    try:
        from cudakit.memory.load.native import NativeTree
    except ImportError:
        if is_required:
            raise
        return None
    return NativeTree


# Size in bytes of the Python object that each opcode creates: lists and tuples (created as lists),
# dictionaries, and the stack that MARK begins. All other opcodes of real snapshots create 4 bytes of objects
# per byte of the file.
_OBJECT_BYTES = {
    b"]": 64,
    b")": 64,
    b"l": 64,
    b"t": 64,
    b"\x85": 64,
    b"(": 64,
    b"}": 240,
    b"d": 240,
}


def _estimated_object_bytes(content: bytes) -> int:
    container_bytes = sum(
        content.count(opcode) * object_size for opcode, object_size in _OBJECT_BYTES.items()
    )
    return container_bytes + 4 * len(content)


def _read_objects(content: bytes) -> Any:
    # The garbage collector would visit all dictionaries repeatedly, and find no garbage.
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        return Machine(content).run()
    finally:
        if gc_was_enabled:
            gc.enable()


def _rejection(content: bytes, reason: str, offset: int) -> SnapshotError:
    if reason == "truncated":
        return SnapshotError(
            f"the file is truncated after {len(content):,} bytes: copying or writing it did not finish",
            hint=_HINT_COPY,
        )
    opcode_name = _opcode_name(content[offset])
    if reason == "opcode":
        return SnapshotError(
            f"byte {offset:,}: {_opcode_error(opcode_name)}", hint=SNAPSHOT_FILE.hint
        )
    suffix = "" if content.startswith(b"\x80") else ", or not a pickle"
    return SnapshotError(
        f"byte {offset:,}: opcode {opcode_name} {_DAMAGE_REASONS[reason]}: the file is damaged{suffix}",
        hint=_HINT_COPY if not suffix else SNAPSHOT_FILE.hint,
    )


def _opcode_name(opcode: int) -> str:
    # Only errors need this table, and building it takes milliseconds.
    from pickletools import opcodes

    opcode_names = {opcode_info.code: opcode_info.name for opcode_info in opcodes}
    return opcode_names.get(chr(opcode), f"{opcode:#04x}")


def _opcode_error(name: str) -> str:
    if _CALLING_OPCODES.fullmatch(name):
        return (
            f"opcode {name} names or calls a class or function; "
            "a memory snapshot holds only plain data, so nothing was loaded"
        )
    if name.startswith("0x"):
        return f"{name} is not an opcode: the file is not a pickle, or it is damaged"
    return f"opcode {name} makes an object that no memory snapshot holds, so nothing was loaded"
