"""Files of a chosen size that cost as much time and memory as possible: shared, nested and repeated content.

The writers make pickles by hand, because pickle.dumps of such content would itself take too long.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterator

from memory.load.files import LARGE, zstd

_START = b"\x80\x04"


def text(words: str) -> bytes:
    """Return the opcode that pushes a text."""
    raw = words.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """Return the opcode that pushes an integer."""
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def items(*content: bytes) -> bytes:
    """Return the opcodes that push a list."""
    return b"](" + b"".join(content) + b"e"


def pairs(**content: bytes) -> bytes:
    """Return the opcodes that push a dictionary."""
    return b"}(" + b"".join(text(key) + value for key, value in content.items()) + b"u"


def put(content: bytes, index: int) -> bytes:
    """Return the opcodes that store the top of the stack in the memo."""
    return content + b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """Return the opcode that pushes a value of the memo."""
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


# The text keys of events, stored under small memo indices.
_KEYS = (
    "action",
    "addr",
    "size",
    "stream",
    "time_us",
    "frames",
    "name",
    "filename",
    "line",
    "pool_id",
)
_WORDS = ("alloc", "free_requested", "free_completed", "segment_alloc", "x")
_MEMO = {word: index for index, word in enumerate((*_KEYS, *_WORDS))}
_FIRST_FREE = len(_MEMO)
_PREAMBLE = _START + b"".join(put(text(word), index) + b"0" for word, index in _MEMO.items())


def word(name: str) -> bytes:
    """Return the opcode that pushes a stored word."""
    return get(_MEMO[name])


def entry(**values: bytes) -> bytes:
    """Return the opcodes that push a trace entry with stored keys."""
    return b"}(" + b"".join(word(key) + value for key, value in values.items()) + b"u"


def snapshot(preamble: bytes = b"", **parts: bytes) -> bytes:
    """Return a pickle whose memo holds the keys; ``preamble`` can store more values."""
    return _PREAMBLE + preamble + pairs(**parts) + b"."


def kept(content: bytes, index: int) -> bytes:
    """Return the opcodes that store a value in the memo and pop it."""
    return put(content, index) + b"0"


def _alloc(address: int, size: int = 512, **more: bytes) -> bytes:
    return entry(action=word("alloc"), addr=number(address), size=number(size), **more)


def _frame(index: int) -> bytes:
    return entry(name=text(f"f{index}"), filename=word("x"), line=number(index))


def one_event_many_times(size: int) -> bytes:
    shared = kept(_alloc(LARGE), _FIRST_FREE)
    return snapshot(shared, device_traces=items(items(get(_FIRST_FREE) * (size // 2))))


def distinct_events(size: int) -> bytes:
    events = (_alloc(LARGE + 512 * i) for i in range(size // 30))
    return snapshot(device_traces=items(items(*events)))


def allocations_and_frees(size: int) -> bytes:
    events = []
    for i in range(size // 90):
        at = number(LARGE + 512 * (i * 7919 % 4096))
        events += [
            entry(action=word(action), addr=at, size=number(512), stream=number(i % 3))
            for action in ("alloc", "free_requested", "free_completed")
        ]
    return snapshot(device_traces=items(items(*events)))


def nested_lifetimes(size: int) -> bytes:
    """Allocate all, then free all, in the same order."""
    n = size // 60
    actions = ("alloc", "free_requested", "free_completed")
    events = [
        entry(action=word(action), addr=number(LARGE + 512 * i), size=number(512))
        for action in actions
        for i in range(n * 2 // 3)
    ]
    return snapshot(device_traces=items(items(*events)))


def one_trace_for_all_devices(size: int) -> bytes:
    shared = kept(items(get(_FIRST_FREE) * (size // 2)), _FIRST_FREE + 1)
    preamble = kept(_alloc(LARGE), _FIRST_FREE) + shared
    return snapshot(preamble, device_traces=items(get(_FIRST_FREE + 1) * 128))


def events_of_128_devices(size: int) -> bytes:
    rows = size // 30 // 128
    traces = [items(*(_alloc(LARGE + 512 * i) for i in range(rows))) for _ in range(128)]
    return snapshot(device_traces=items(*traces))


def _segment(address: bytes, blocks: bytes, device: int = 0) -> bytes:
    return pairs(
        device=number(device),
        address=address,
        total_size=number(1 << 30),
        segment_type=text("large"),
        blocks=blocks,
    )


def _block(address: int, size: int = 512) -> bytes:
    return pairs(address=number(address), size=number(size), state=text("active_allocated"))


def one_block_list_for_all_devices(size: int) -> bytes:
    shared = kept(items(get(_FIRST_FREE) * (size // 2)), _FIRST_FREE + 1)
    preamble = kept(_block(LARGE), _FIRST_FREE) + shared
    segments = [_segment(number(LARGE), get(_FIRST_FREE + 1), device) for device in range(128)]
    return snapshot(preamble, segments=items(*segments))


def many_segments(size: int) -> bytes:
    segments = [
        _segment(number(LARGE + (i << 30)), items(_block(LARGE + (i << 30))), i % 128)
        for i in range(size // 220)
    ]
    return snapshot(segments=items(*segments))


def many_blocks(size: int) -> bytes:
    blocks = [_block(LARGE + 512 * i) for i in range(size // 80)]
    return snapshot(segments=items(_segment(number(LARGE), items(*blocks))))


def one_stack_for_all_devices(size: int) -> bytes:
    stack = kept(items(get(_FIRST_FREE) * (size // 2)), _FIRST_FREE + 1)
    preamble = kept(_frame(1), _FIRST_FREE) + stack
    traces = [items(_alloc(LARGE, frames=get(_FIRST_FREE + 1))) for _ in range(128)]
    return snapshot(preamble, device_traces=items(*traces))


def nested_stacks(size: int) -> bytes:
    """Return a file in which each call stack has one frame more than the one before."""
    count = int((size / 2) ** 0.5)
    frames = b"".join(kept(_frame(i), _FIRST_FREE + 1 + i) for i in range(16))
    stacks = (b"".join(get(_FIRST_FREE + 1 + i % 16) for i in range(n)) for n in range(count))
    events = (_alloc(LARGE + 512 * n, frames=items(s)) for n, s in enumerate(stacks))
    return snapshot(frames, device_traces=items(items(*events)))


def distinct_frames(size: int) -> bytes:
    events = (_alloc(LARGE + 512 * i, frames=items(_frame(i))) for i in range(size // 65))
    return snapshot(device_traces=items(items(*events)))


def frames_and_stacks_of_128_devices(size: int) -> bytes:
    rows = size // 70 // 128
    traces = [
        items(*(_alloc(LARGE + 512 * i, frames=items(_frame(i * 128 + d))) for i in range(rows)))
        for d in range(128)
    ]
    return snapshot(device_traces=items(*traces))


def one_deep_stack_in_many_events(size: int) -> bytes:
    frames = b"".join(kept(_frame(i), _FIRST_FREE + 1 + i) for i in range(200))
    stack = kept(items(*(get(_FIRST_FREE + 1 + i % 200) for i in range(size // 20))), _FIRST_FREE)
    events = (_alloc(LARGE + 512 * i, frames=get(_FIRST_FREE)) for i in range(size // 45))
    return snapshot(frames + stack, device_traces=items(items(*events)))


def one_long_name_in_many_events(size: int) -> bytes:
    long_name = entry(name=text("n" * (size // 2)), filename=word("x"), line=number(1))
    preamble = kept(items(long_name), _FIRST_FREE)
    events = (_alloc(LARGE + 512 * i, frames=get(_FIRST_FREE)) for i in range(size // 80))
    return snapshot(preamble, device_traces=items(items(*events)))


def one_long_name_in_many_stacks(size: int) -> bytes:
    long_name = kept(
        entry(name=text("n" * (size // 2)), filename=word("x"), line=number(1)), _FIRST_FREE
    )
    events = (
        _alloc(LARGE + 512 * i, frames=items(get(_FIRST_FREE), _frame(i)))
        for i in range(size // 140)
    )
    return snapshot(long_name, device_traces=items(items(*events)))


def many_pools(size: int) -> bytes:
    """Return pools whose numbers have equal hashes, as far as 64 bits allow."""
    events = (
        _alloc(LARGE + 512 * i, pool_id=items(number((2**61 - 1) * (i % 4)), number(i)))
        for i in range(size // 60)
    )
    return snapshot(device_traces=items(items(*events)))


def pools_of_large_numbers(size: int) -> bytes:
    events = (
        _alloc(LARGE + 512 * i, pool_id=items(number((2**61 - 1) * (i + 5)), number(i)))
        for i in range(size // 60)
    )
    return snapshot(device_traces=items(items(*events)))


def one_large_pool(size: int) -> bytes:
    pool = kept(items(b"K\x01" * (size // 4)), _FIRST_FREE)
    events = (_alloc(LARGE, pool_id=get(_FIRST_FREE)) for _ in range(size // 80))
    return snapshot(pool, device_traces=items(items(*events)))


def annotations(size: int) -> bytes:
    stages = (text("START"), text("END"))
    ranges = (
        pairs(stage=stages[i % 2], name=text(f"step {i // 2}"), device=number(0), time_us=number(i))
        for i in range(size // 90)
    )
    event = _alloc(LARGE, time_us=number(5))
    return snapshot(device_traces=items(items(event)), external_annotations=items(*ranges))


def nested_annotations(size: int) -> bytes:
    n = size // 100
    ranges = [
        pairs(stage=text(stage), name=text(f"r{i}"), device=number(0), time_us=number(time))
        for stage, order in (("START", range(n)), ("END", range(n - 1, -1, -1)))
        for i in order
        for time in [i if stage == "START" else 10**7 - i]
    ]
    events = (_alloc(LARGE + 512 * i, time_us=number(i * 7)) for i in range(n // 2))
    return snapshot(device_traces=items(items(*events)), external_annotations=items(*ranges))


def marks(size: int) -> bytes:
    entries = (
        pairs(name=text(f"mark {i}"), device=number(0), time_us=number(i))
        for i in range(size // 60)
    )
    event = _alloc(LARGE, time_us=number(5))
    return snapshot(device_traces=items(items(event)), cudakit_marks=items(*entries))


def annotation_times_as_texts(size: int) -> bytes:
    shared = kept(items(b"K\x01" * (size // 4)), _FIRST_FREE)
    entries = (
        pairs(stage=text("START"), name=text("a"), time_us=get(_FIRST_FREE))
        for _ in range(size // 80)
    )
    return snapshot(shared, segments=b"]", external_annotations=items(*entries))


def empty_lists_in_settings(size: int) -> bytes:
    return snapshot(segments=b"]", allocator_settings=items(b"]" * size))


def many_settings(size: int) -> bytes:
    settings = {f"s{i}": b"K\x01" for i in range(size // 14)}
    return snapshot(segments=b"]", allocator_settings=pairs(**settings))


def many_keys(size: int) -> bytes:
    return snapshot(segments=b"]", **{f"k{i}": b"N" for i in range(size // 13)})


def distinct_keys_in_events(size: int) -> bytes:
    events = (pairs(**{f"k{i}": b"N"}) for i in range(size // 15))
    return snapshot(device_traces=items(items(*events)))


def streams(size: int) -> bytes:
    events = (_alloc(LARGE, stream=number(i << 40)) for i in range(size // 50))
    return snapshot(device_traces=items(items(*events)))


def steps(size: int) -> bytes:
    """Return a trace with as many training steps as fit."""
    count = size // 260
    events, ranges = [], []
    for i in range(count):
        at = LARGE + 512 * (i % 5)
        events.append(_alloc(at, time_us=number(10 * i + 1)))
        events += [
            entry(action=word(a), addr=number(at), size=number(512), time_us=number(10 * i + 2))
            for a in ("free_requested", "free_completed")
        ]
        ranges += [
            pairs(stage=text(stage), name=text(f"step {i}"), device=number(0), time_us=number(t))
            for stage, t in (("START", 10 * i), ("END", 10 * i + 9))
        ]
    return snapshot(device_traces=items(items(*events)), external_annotations=items(*ranges))


def _failed() -> bytes:
    return pairs(action=text("oom"), size=number(1 << 30), device_free=number(1 << 20))


def failures(size: int) -> bytes:
    """Return a trace with as many failed allocations as fit, after as many allocations."""
    n = size // 90
    events = (_alloc(LARGE + 512 * i) for i in range(n))
    return snapshot(device_traces=items(items(*events, _failed() * n)))


def failures_of_128_devices(size: int) -> bytes:
    n = size // 90 // 128
    trace = items(*(_alloc(LARGE + 512 * i) for i in range(n)), _failed() * n)
    return snapshot(device_traces=items(trace * 128))


def failures_between_allocations(size: int) -> bytes:
    events = (_alloc(LARGE + 512 * i) + _failed() for i in range(size // 90))
    return snapshot(device_traces=items(items(*events)))


def failures_that_do_not_recur(size: int) -> bytes:
    """Return a trace whose last allocation fails although the replay has memory for it."""
    events = (_alloc(LARGE + 512 * i) + _failed() for i in range(size // 90))
    fits = pairs(action=text("oom"), size=number(1), device_free=number(1 << 40))
    return snapshot(device_traces=items(items(*events, fits)))


def large_numbers(size: int) -> bytes:
    digits = b"\x8b" + struct.pack("<I", size // 3) + b"\x7f" * (size // 3)
    return snapshot(
        device_traces=items(items(entry(action=word("alloc"), addr=digits, size=digits)))
    )


def lists_in_lists(size: int) -> bytes:
    return _START + b"]" * (size // 2) + b"a" * (size // 2 - 1) + b"."


def empty_dictionaries(size: int) -> bytes:
    return snapshot(device_traces=items(items(b"}" * size)))


def json_empty_dictionaries(size: int) -> bytes:
    return b'{"device_traces":[[' + b"{}," * (size // 3) + b"{}]]}"


def json_events(size: int) -> bytes:
    event = {"action": "alloc", "addr": LARGE, "size": 512}
    return json.dumps({"device_traces": [[event] * (size // 60)]}).encode()


def json_lists(size: int) -> bytes:
    return b'{"device_traces":[' + b"[]," * (size // 3) + b"[]]}"


def json_small_dictionaries(size: int) -> bytes:
    return b'{"device_traces":[[' + b'{"":{"":{}}},' * (size // 13) + b"{}]]}"


_SHAPES: tuple[Callable[[int], bytes], ...] = (
    one_event_many_times, distinct_events, allocations_and_frees, nested_lifetimes,
    one_trace_for_all_devices, events_of_128_devices, one_block_list_for_all_devices, many_segments,
    many_blocks, one_stack_for_all_devices, nested_stacks, distinct_frames,
    frames_and_stacks_of_128_devices, one_deep_stack_in_many_events, one_long_name_in_many_events,
    one_long_name_in_many_stacks, many_pools, pools_of_large_numbers, one_large_pool, annotations,
    nested_annotations, marks, annotation_times_as_texts, empty_lists_in_settings, many_settings, many_keys,
    distinct_keys_in_events, streams, steps, failures, failures_of_128_devices,
    failures_between_allocations, failures_that_do_not_recur, large_numbers, lists_in_lists,
    empty_dictionaries, json_empty_dictionaries, json_events, json_lists, json_small_dictionaries,
)  # fmt: skip


def shapes(size: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the name of each shape, and a function that returns its file of about ``size`` bytes."""
    for make in _SHAPES:
        yield make.__name__, lambda make=make: make(size)


def compressed(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a file with each compression."""
    yield "gz", gzip.compress(content, 9)
    yield "zst", zstd.compress(content, 19)
