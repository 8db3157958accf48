"""Load a snapshot file. No class in a file is looked up, and nothing in a file is called."""

from __future__ import annotations

import gzip
import io
import json
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

import numpy as np

from cudakit.errors import SnapshotError
from cudakit.input_files import LOG_MAGIC, empty_file_error, read_error, wrong_file_error
from cudakit.memory.load import pickled
from cudakit.memory.load.columns import (
    DeviceRows,
    StreamNumbers,
    Tables,
    Warnings,
    is_range,
    read_events,
    read_final_states,
    segment_devices,
)
from cudakit.memory.load.tree import (
    SNAPSHOT_FILE,
    Budget,
    Handles,
    NotASnapshotError,
    ObjectTree,
    Tree,
    memory_share,
)
from cudakit.memory.snapshot import (
    HOST,
    MARKS_KEY,
    Annotation,
    Blocks,
    BlockState,
    DeviceTrace,
    Events,
    Ints,
    Mark,
    Mask,
    SegmentKind,
    Segments,
    Snapshot,
)
from cudakit.torch_rules.settings import flag_of_device

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
    source_file = read(path, memory_bytes)
    budget = Budget(source_file.file_bytes, len(source_file.content), memory_bytes)
    try:
        file_format, tree = _parse_tree(source_file.content, budget)
        return build(
            tree,
            source=source_file.name,
            file_format=file_format,
            size_bytes=len(source_file.content),
        )
    except NotASnapshotError as error:
        raise wrong_file_error(
            source_file.name,
            source_file.content,
            SNAPSHOT_FILE,
            reason=error.message,
            error_type=SnapshotError,
        ) from None
    except SnapshotError as error:
        raise SnapshotError(
            f"{source_file.name}: {error.message}", hint=error.hint or SNAPSHOT_FILE.hint
        ) from None


def _parse_tree(content: bytes, budget: Budget) -> tuple[str, Tree]:
    if content[:64].lstrip(_BEFORE_JSON)[:1] in (b"{", b"["):
        return "json", _json_tree(content, budget)
    # A log of cudakit run starts with "c", as a pickle of protocol 0 can.
    if content.startswith(LOG_MAGIC) or not content.startswith(_PICKLE_STARTS):
        start = content[:8].decode("latin-1")
        raise NotASnapshotError(f"it is neither a pickle nor JSON; its first bytes are {start!a}")
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


# --- Read the uncompressed bytes of a snapshot file ------------------------------------------------

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZIP_MAGIC = b"PK\x03\x04"
_CHUNK_BYTES = 1 << 20

# Pickles of snapshots compress about 12-fold, and their JSON about 48-fold. Files that expand further are
# rejected, so that memory is proportional to the file size. The check starts after a fixed number of bytes,
# because the start of a file can expand more.
_MAX_EXPANSION = 50
_MIN_CHECKED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """The uncompressed content of a file, its name, and its size before decompression."""

    name: str
    content: bytes
    file_bytes: int


def read(path: str, memory_bytes: int | None = None) -> Source:
    """Read a file (``-`` is standard input), and decompress gzip and Zstandard.

    ``memory_bytes`` is the available memory; None is unlimited. Raises SnapshotError if the file cannot be
    read, is empty, is a zip archive, or is larger than half of the available memory.
    """
    max_bytes = memory_share(memory_bytes)
    name = "standard input" if path == "-" else path
    compressed_bytes = (
        _read_stream(sys.stdin.buffer, name, max_bytes)
        if path == "-"
        else _read_file(Path(path), max_bytes)
    )
    if not compressed_bytes:
        raise empty_file_error(name, SNAPSHOT_FILE, error_type=SnapshotError)
    if compressed_bytes.startswith(_ZIP_MAGIC):
        raise wrong_file_error(name, compressed_bytes, SNAPSHOT_FILE, error_type=SnapshotError)
    content = _unpack(compressed_bytes, name, max_bytes)
    if not content:
        raise SnapshotError(f"{name} is empty after decompression", hint=SNAPSHOT_FILE.hint)
    return Source(name, content, len(compressed_bytes))


def _read_file(path: Path, max_bytes: int) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise SnapshotError(
                f"{path} is a device, not a file", hint="name a file, or - for standard input"
            )
        if stat.S_ISREG(status.st_mode) and status.st_size > max_bytes:
            raise _size_error(str(path), max_bytes)
        with path.open("rb") as stream:
            return stream.read() if status.st_size else _read_stream(stream, str(path), max_bytes)
    except (OSError, ValueError) as error:
        raise read_error(path, error, error_type=SnapshotError) from None


def _read_stream(stream: IO[bytes], name: str, max_bytes: int) -> bytes:
    """Read a stream, which can be endless, up to the limit."""
    content = io.BytesIO()
    while chunk := stream.read(_CHUNK_BYTES):
        content.write(chunk)
        if content.tell() > max_bytes:
            raise _size_error(name, max_bytes)
    return content.getvalue()


def _size_error(name: str, max_bytes: int) -> SnapshotError:
    return SnapshotError(
        f"{name} is larger than {max_bytes >> 20:,} MiB, half of the available memory",
        hint="use a machine with more memory, or take the snapshot again with fewer events (max_entries)",
    )


def _unpack(compressed_bytes: bytes, name: str, max_bytes: int) -> bytes:
    compressed_file = io.BytesIO(compressed_bytes)
    if compressed_bytes.startswith(_GZIP_MAGIC):
        return _expand(gzip.GzipFile(fileobj=compressed_file), compressed_file, name, max_bytes)
    if compressed_bytes.startswith(_ZSTD_MAGIC):
        # The standard library has Zstandard since Python 3.14; backports.zstd is the same code.
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        return _expand(zstd.ZstdFile(compressed_file), compressed_file, name, max_bytes)
    return compressed_bytes


def _expand(
    reader: io.BufferedIOBase, compressed_file: io.BufferedIOBase, name: str, max_bytes: int
) -> bytes:
    """Return all bytes of ``reader``. Raises SnapshotError if they exceed ``max_bytes`` or expand too far."""
    content = io.BytesIO()
    try:
        while chunk := reader.read(_CHUNK_BYTES):
            content.write(chunk)
            if content.tell() > max(_MIN_CHECKED_BYTES, _MAX_EXPANSION * compressed_file.tell()):
                raise SnapshotError(
                    f"{name} expands to more than {_MAX_EXPANSION} times its size; "
                    "no snapshot compresses that well",
                    hint="if you trust the file, decompress it first",
                )
            if content.tell() > max_bytes:
                raise _size_error(f"{name}, decompressed,", max_bytes)
    except Exception as error:
        # ZstdError derives from Exception, and its module is imported for Zstandard files only.
        is_damage = isinstance(error, EOFError | OSError | zlib.error)
        if not is_damage and type(error).__name__ != "ZstdError":
            raise
        raise SnapshotError(
            f"{name} cannot be decompressed: the file is damaged or truncated ({error})",
            hint="copy the file again, or write the snapshot again",
        ) from None
    return content.getvalue()


# --- Build a Snapshot from the tree of a file ------------------------------------------------------
#
# This module and ``columns`` know PyTorch's keys: torch/csrc/cuda/memory_snapshot.cpp and
# c10/cuda/CUDACachingAllocator.h of torch 1.13 to 2.15. A missing key has the meaning that it had in the
# version that wrote the file; unknown keys are ignored.

# c10::DeviceIndex is a signed number of 8 bits.
_MAX_DEVICES = 128
_SNAPSHOT_KEYS = ("segments", "device_traces", "host_segments", "host_traces")


def build(tree: Tree, *, source: str, file_format: str, size_bytes: int) -> Snapshot:
    """Return the Snapshot of a tree.

    Raises SnapshotError if the tree is not a snapshot, or has impossible sizes.
    """
    parts = _snapshot_parts(tree)
    tables = Tables(tree)
    settings = valid_settings(_plain_part(tree, parts, "allocator_settings"))
    # Files of PyTorch builds that do not write this flag lack it.
    key = "trace_alloc_overflowed"
    overflow = _plain_part(tree, parts, key) if key in parts else settings.get(key)
    devices = [
        *_device_traces(tree, tables, parts, overflow),
        *_host_traces(tree, tables, parts),
    ]
    tables.spend_stacks(devices)
    annotations, marks = _annotations(tree, tables, parts), _marks(tree, tables, parts)
    return Snapshot(
        source=source,
        format=file_format,
        size_bytes=size_bytes,
        devices=tuple(devices),
        frames=tuple(tables.frames),
        stacks=tables.stacks,
        texts=tuple(tables.texts),
        pools=tables.pools,
        annotations=annotations,
        marks=marks,
        settings=settings,
        has_times=any(bool(device.events.time_us.any()) for device in devices),
    )


def _snapshot_parts(tree: Tree) -> dict[str, int]:
    # torch.cuda.memory_snapshot() and MemPool.snapshot() return a list of segments without a dictionary.
    if tree.is_list(tree.root):
        _, items = tree.children(_handle_array(tree.root))
        with suppress(SnapshotError):
            if len(items) and "total_size" in tree.members(int(items[0])):
                return {"segments": tree.root}
        raise NotASnapshotError("it is a list, but not of memory segments")
    parts = tree.members(tree.root)
    if not any(name in parts for name in _SNAPSHOT_KEYS):
        if not parts:
            raise NotASnapshotError("its dictionary is empty")
        key_names = ", ".join(sorted(parts)[:4])
        raise NotASnapshotError(f"its dictionary has other keys ({key_names[:80]})")
    return parts


def _device_traces(
    tree: Tree, tables: Tables, parts: Mapping[str, int], overflow: object
) -> Iterator[DeviceTrace]:
    counts, entries = tree.children(_list_part(tree, parts, "device_traces"))
    segments = _list_part(tree, parts, "segments")
    # The devices that have events or segments.
    used = {
        *np.flatnonzero(counts).tolist(),
        *np.unique(segment_devices(tree, segments)).tolist(),
    } or {0}
    for ordinal in (min(used), max(used)):
        if not 0 <= ordinal < _MAX_DEVICES:
            raise SnapshotError(
                f"the file has a device {ordinal}, which is impossible: it is damaged"
            )
    ends = [0, *np.cumsum(counts).tolist()]
    devices = [
        DeviceRows(
            device,
            slice(*ends[device : device + 2]) if device < len(counts) else slice(0),
            StreamNumbers(),
        )
        for device in sorted(used)
    ]
    events = read_events(tree, tables, entries, devices)
    final_states = read_final_states(tree, tables, segments, devices)
    for rows, device_events, final_state in zip(devices, events, final_states, strict=True):
        has_overflowed = flag_of_device(overflow, rows.device)
        yield _device_trace(rows, device_events, final_state, has_overflowed)


def _device_trace(
    rows: DeviceRows,
    events_and_warnings: tuple[Events, Warnings],
    final_state: tuple[Segments, Blocks, Warnings],
    overflowed: bool | None = None,
) -> DeviceTrace:
    (events, event_warnings), (segments, blocks, state_warnings) = events_and_warnings, final_state
    warnings = event_warnings + state_warnings
    return DeviceTrace(
        rows.device, events, segments, blocks, rows.streams.raw_streams, overflowed, warnings
    )


def _host_traces(tree: Tree, tables: Tables, parts: Mapping[str, int]) -> Iterator[DeviceTrace]:
    traces = _list_part(tree, parts, "host_traces")
    # A list of entries or, as for devices, of such lists.
    is_nested = len(traces) > 0 and tree.is_list(int(traces[0]))
    entries = tree.children(traces)[1] if is_nested else traces
    segments = _list_part(tree, parts, "host_segments")
    if len(entries) or len(segments):
        rows = DeviceRows(HOST, slice(len(entries)), StreamNumbers())
        (events,) = read_events(tree, tables, entries, [rows])
        state = read_host_state(tree, tables, rows.streams, segments)
        yield _device_trace(rows, events, state)


def _annotations(tree: Tree, tables: Tables, parts: Mapping[str, int]) -> tuple[Annotation, ...]:
    """Return the starts and ends of named ranges; entries without stage or time are ignored."""
    handles = _list_part(tree, parts, "external_annotations")
    tree.budget.spend_rows(len(handles))
    stages = tables.codes(tree.column(handles, "stage"), {"START": 1, "END": 0}, default=2)
    times, has_time = _parse_numbers(tree, tree.column(handles, "time_us"))
    usable = np.flatnonzero(has_time & (stages != 2))
    names = tables.text_ids(tree.column(handles[usable], "name")).tolist()
    devices, _ = _parse_numbers(tree, tree.column(handles[usable], "device"))
    texts = tuple(tables.texts)
    columns = (names, stages[usable].tolist(), devices.tolist(), times[usable].tolist())
    return tuple(
        Annotation(texts[name], stage == 1, device, time_us)
        for name, stage, device, time_us in zip(*columns, strict=True)
    )


def _marks(tree: Tree, tables: Tables, parts: Mapping[str, int]) -> tuple[Mark, ...]:
    """Return the marks that ``run --memory`` recorded; entries without a time are ignored."""
    handles = _list_part(tree, parts, MARKS_KEY)
    tree.budget.spend_rows(len(handles))
    times, has_time = tree.integers(tree.column(handles, "time_us"))
    names = tables.text_ids(tree.column(handles[has_time], "name")).tolist()
    devices, _ = tree.integers(tree.column(handles[has_time], "device"))
    texts = tuple(tables.texts)
    columns = (names, devices.tolist(), times[has_time].tolist())
    return tuple(
        Mark(texts[name], device, time_us) for name, device, time_us in zip(*columns, strict=True)
    )


def _parse_numbers(tree: Tree, handles: Handles) -> tuple[Ints, Mask]:
    """Return integers, also those that torch's C++ writer stores as text, and which nodes are integers."""
    numbers, is_integer = tree.integers(handles)
    row_indices = np.flatnonzero(~is_integer & (handles != 0)).tolist()
    for row_index, text in zip(row_indices, tree.texts(handles[row_indices]), strict=True):
        if len(text) < 19 and text.isdecimal():
            numbers[row_index], is_integer[row_index] = int(text), True
    return numbers, is_integer


def _plain_part(tree: Tree, parts: Mapping[str, int], key: str) -> object:
    return tree.plain_object(parts[key]) if key in parts else None


def _list_part(tree: Tree, parts: Mapping[str, int], key: str) -> Handles:
    return tree.children(_handle_array(parts.get(key, 0)))[1]


def _handle_array(handle: int) -> Handles:
    return np.array([handle], np.uint64)


Number: TypeAlias = bool | int | float
Scalar: TypeAlias = Number | str | None
Setting: TypeAlias = Scalar | list[Scalar] | dict[str, Number]

# The keys of roundup_power2_divisions are powers of two below 2**64.
_MAX_KEY_DIGITS = 20


def valid_settings(settings: object) -> dict[str, Setting]:
    """Return the valid settings: scalars of at most 64 bits, lists of scalars, or dicts of numbers."""
    if not isinstance(settings, dict):
        return {}
    return {key: value for key, value in settings.items() if _is_setting(value)}


def _is_setting(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_scalar, value))
    if isinstance(value, dict):
        return all(
            _is_number(number) and len(name) <= _MAX_KEY_DIGITS for name, number in value.items()
        )
    return _is_scalar(value)


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: object) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    return isinstance(value, float)


# --- Read the segments and the trace of the pinned host allocator (torch 2.14) ---------------------
#
# PyTorch does not document the keys of host segments. So each value is read from all keys that PyTorch's
# other structures use for it, and invalid segments are skipped instead of rejecting the file.

_ADDRESS_KEYS = ("address", "addr")
_SIZE_KEYS = ("size", "total_size")
_IN_USE_KEYS = ("allocated", "allocated_size", "is_allocated")
_ACTIVE_KEYS = ("active", "active_size", "is_active")
_POOL_KEYS = ("segment_pool_id", "pool_id")


def read_host_state(
    tree: Tree, tables: Tables, streams: StreamNumbers, handles: Handles
) -> tuple[Segments, Blocks, Warnings]:
    """Return the host segments; each is one block."""
    tree.budget.spend_rows(len(handles))
    address, has_address = _integers(tree, handles, _ADDRESS_KEYS)
    size, has_size = _integers(tree, handles, _SIZE_KEYS)
    usable = np.flatnonzero(has_address & has_size & is_range(address, size))
    usable = usable[np.argsort(address[usable].view(np.uint64), kind="stable")]
    skipped_count = len(handles) - len(usable)
    handles, address, size = handles[usable], address[usable], size[usable]
    in_use, has_use = _integers(tree, handles, _IN_USE_KEYS)
    active, has_active = _integers(tree, handles, _ACTIVE_KEYS)
    has_state = has_use | has_active
    states = np.select(
        [(in_use != 0) | ~has_state, active != 0],
        [BlockState.ALLOCATED, BlockState.PENDING_FREE],
        BlockState.INACTIVE,
    ).astype(np.uint8)
    stack_ids = tables.stack_ids(tree.column(handles, "frames"))
    segments = Segments(
        address=address.view(np.uint64),
        size=size,
        stream=streams.number_streams(tree.integers(tree.column(handles, "stream"))[0]),
        kind=np.full(len(size), SegmentKind.UNKNOWN, np.uint8),
        pool=tables.pool_ids(_first_present_handles(tree, handles, _POOL_KEYS)),
        expandable=np.zeros(len(size), np.bool_),
        stack=stack_ids,
    )
    blocks = Blocks(
        segment=np.arange(len(size), dtype=np.int32),
        address=segments.address,
        size=size,
        requested=np.where(states == BlockState.INACTIVE, 0, size),
        state=states,
        stack=stack_ids,
    )
    warnings = []
    if skipped_count:
        warnings.append(
            f"{skipped_count:,} host segments without a valid address or size were skipped"
        )
    if stateless_count := int(np.count_nonzero(~has_state)):
        warnings.append(f"{stateless_count:,} host segments without a state count as in use")
    return segments, blocks, tuple(warnings)


def _integers(tree: Tree, handles: Handles, keys: tuple[str, ...]) -> tuple[Ints, Mask]:
    return tree.integers(_first_present_handles(tree, handles, keys))


def _first_present_handles(tree: Tree, handles: Handles, keys: tuple[str, ...]) -> Handles:
    first_handles = np.zeros(len(handles), np.uint64)
    for key in reversed(keys):
        values = tree.column(handles, key)
        first_handles = np.where(values != 0, values, first_handles)
    return first_handles
