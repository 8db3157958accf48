"""Load a snapshot file. No class in a file is looked up, and nothing in a file is called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cudakit.errors import SnapshotError
from cudakit.input_files import LOG_MAGIC, wrong_file_error
from cudakit.memory.load import pickled, schema, source
from cudakit.memory.load.limits import Budget
from cudakit.memory.load.tree import ObjectTree

if TYPE_CHECKING:
    from cudakit.memory.load.tree import Tree
    from cudakit.memory.snapshot import Snapshot

# Bytes that may precede the first character of JSON: byte-order marks, the zeros of UTF-16, and white space.
_BEFORE_JSON = b"\xef\xbb\xbf\xff\xfe\x00 \t\r\n"
# First opcodes of a pickle: PROTO; in protocols 0 and 1 MARK, an empty list or dictionary, or GLOBAL, which
# the reader rejects by name.
_PICKLE_STARTS = (b"\x80", b"(", b"]", b"}", b"c")


def load(path: str, memory_bytes: int | None = None) -> Snapshot:
    """Read a memory snapshot: pickle (protocols 0 to 5) or JSON, plain, gzip or Zstandard; ``-`` is stdin.

    ``memory_bytes`` is the available memory; None is unlimited. Raises SnapshotError, with the reason in one
    line, for any other file, and for a file that needs too much time or memory (see ``limits``).
    """
    source_file = source.read(path, memory_bytes)
    budget = Budget(source_file.file_bytes, len(source_file.content), memory_bytes)
    try:
        file_format, tree = _parse_tree(source_file.content, budget)
        return schema.build(
            tree,
            source=source_file.name,
            file_format=file_format,
            size_bytes=len(source_file.content),
        )
    except source.NotASnapshotError as error:
        raise wrong_file_error(
            source_file.name,
            source_file.content,
            source.SNAPSHOT_FILE,
            reason=error.message,
            error_type=SnapshotError,
        ) from None
    except SnapshotError as error:
        raise SnapshotError(
            f"{source_file.name}: {error.message}", hint=error.hint or source.SNAPSHOT_FILE.hint
        ) from None


def _parse_tree(content: bytes, budget: Budget) -> tuple[str, Tree]:
    if content[:64].lstrip(_BEFORE_JSON)[:1] in (b"{", b"["):
        return "json", _json_tree(content, budget)
    # A log of cudakit run starts with "c", as a pickle of protocol 0 can.
    if content.startswith(LOG_MAGIC) or not content.startswith(_PICKLE_STARTS):
        first_characters = content[:8].decode("latin-1")
        raise source.NotASnapshotError(
            f"it is neither a pickle nor JSON; its first bytes are {first_characters!a}"
        )
    return "pickle", pickled.read(content, budget)


# Size in bytes of the Python object that each character of JSON begins: a dictionary, a list, or another
# value.
_OBJECT_BYTES = {b"{": 232, b"[": 64, b",": 40, b":": 16}


def _json_tree(content: bytes, budget: Budget) -> Tree:
    character_bytes = len(content) if content.isascii() else 4 * len(content)
    object_bytes = sum(
        content.count(character) * object_size for character, object_size in _OBJECT_BYTES.items()
    )
    budget.check_objects(character_bytes + object_bytes)
    try:
        return ObjectTree(json.loads(content), budget)
    except RecursionError:
        reason = "the nesting is too deep"
    except UnicodeDecodeError:
        reason = "the text is not UTF-8"
    except json.JSONDecodeError as error:
        reason = str(error)
    except ValueError:
        reason = "a number has thousands of digits"
    raise SnapshotError(
        f"invalid JSON: {reason}", hint="write the file again with the program that wrote it"
    )
