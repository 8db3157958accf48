"""Read the memory profile of JAX: the arrays that exist at one moment. JAX records no history.

``jax.profiler.device_memory_profile`` returns a gzip file of the protocol buffer of pprof
(github.com/google/pprof, proto/profile.proto). A sample describes all arrays of one size, device and call
stack, with the values "count" and "bytes" (jaxlib/py_client.cc, ``PyClient::HeapProfile``).
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cudakit.errors import InputError
from cudakit.trace.trace_file import Frame, Stack

# Arrays by (device, address): the size in bytes and the call stack.
Arrays: TypeAlias = dict[tuple[int, int], tuple[int, Stack]]

_MAX_BYTES = 256 << 20  # maximum size of an uncompressed profile
_NUMBER_PATTERN = re.compile(r"\d+")
_SIGN_BIT = 1 << 63

# Field numbers of profile.proto.
_SAMPLE, _LOCATION, _FUNCTION, _STRING = 2, 4, 5, 6
_SAMPLE_LOCATIONS, _SAMPLE_VALUES, _SAMPLE_LABELS = 1, 2, 3
_LABEL_KEY, _LABEL_TEXT = 1, 2
_ID = 1  # the id of a location or of a function
_LOCATION_LINES, _LINE_FUNCTION, _LINE_NUMBER = 4, 1, 2
_FUNCTION_NAME, _FUNCTION_FILE = 2, 4


@dataclass(frozen=True, slots=True)
class Sample:
    """All arrays of one size, device and call stack."""

    count: int  # number of arrays
    total_bytes: int  # size of all arrays
    stack: Stack
    # Labels of the sample: "kind" and, for arrays, "device".
    labels: Mapping[str, str] = field(default_factory=dict)


def read_profile(compressed: bytes) -> list[Sample]:
    """Return the samples of a profile, gzip-compressed or not. Raises InputError if it is damaged."""
    try:
        return _samples(_decompress(compressed))
    except (LookupError, ValueError, zlib.error) as error:
        raise InputError(f"the memory profile of JAX cannot be read: {error}") from error


def arrays_of_message(text: str) -> tuple[int, Arrays]:
    """Return the time in nanoseconds and the arrays of a message of the agent. Raises InputError.

    The message is JSON: ``time_ns``, ``profile`` (base64), ``buffers`` as [device, address, bytes], and
    ``devices``, which maps the device numbers of JAX to those of CUDA. A profile has no addresses: the
    arrays of one size on one device get the addresses of the buffers of this size, in any order.
    """
    try:
        message = json.loads(text)
        samples = read_profile(b64decode(message["profile"]))
        devices = {int(number): int(device) for number, device in message["devices"].items()}
        addresses: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for device, address, size_bytes in message["buffers"]:
            addresses[int(device), int(size_bytes)].append(int(address))
        return int(message["time_ns"]), _arrays(samples, devices, addresses)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the memory profile of JAX cannot be read: {error}") from error


def _arrays(
    samples: Sequence[Sample],
    devices: Mapping[int, int],
    addresses: Mapping[tuple[int, int], list[int]],
) -> Arrays:
    arrays: Arrays = {}
    for sample in samples:
        numbers = _NUMBER_PATTERN.findall(sample.labels.get("device", ""))
        device = devices.get(int(numbers[-1])) if numbers else None
        if device is None or not sample.count:
            continue  # the sample is an executable, or an array in host memory
        size_bytes = sample.total_bytes // sample.count
        unused_addresses = addresses.get((device, size_bytes), [])
        for _ in range(min(sample.count, len(unused_addresses))):
            arrays[device, unused_addresses.pop()] = (size_bytes, sample.stack)
    for (device, size_bytes), unused_addresses in addresses.items():
        for address in unused_addresses:  # the array was created after the profile
            arrays[device, address] = (size_bytes, ())
    return arrays


def _decompress(content: bytes) -> bytes:
    if content[:2] != b"\x1f\x8b":
        return content
    decompressor = zlib.decompressobj(wbits=31)
    result = decompressor.decompress(content, _MAX_BYTES)
    if not decompressor.eof:
        raise ValueError("it is truncated, or too large")
    return result


def _samples(content: bytes) -> list[Sample]:
    messages_by_number: defaultdict[int, list[bytes]] = defaultdict(list)
    for number, value in _fields(content):
        if isinstance(value, bytes):
            messages_by_number[number].append(value)
    strings = [value.decode(errors="replace") for value in messages_by_number[_STRING]]
    functions = {}
    for message in messages_by_number[_FUNCTION]:
        values = _integers(message)
        name, file = values.get(_FUNCTION_NAME, 0), values.get(_FUNCTION_FILE, 0)
        functions[values[_ID]] = (strings[name], strings[file])
    frames = dict(_frames(message, functions) for message in messages_by_number[_LOCATION])
    return [_sample(message, frames, strings) for message in messages_by_number[_SAMPLE]]


def _frames(
    location_message: bytes, functions: Mapping[int, tuple[str, str]]
) -> tuple[int, tuple[Frame, ...]]:
    """Return the number of a location, and its frames: more than one if functions are inlined."""
    frames = []
    for number, value in _fields(location_message):
        if number == _LOCATION_LINES and isinstance(value, bytes):
            line = _integers(value)
            function, file = functions[line[_LINE_FUNCTION]]
            frames.append(Frame(function, file, max(_as_signed(line.get(_LINE_NUMBER, 0)), 0)))
    return _integers(location_message)[_ID], tuple(frames)


def _sample(
    message: bytes, frames: Mapping[int, tuple[Frame, ...]], strings: Sequence[str]
) -> Sample:
    locations: list[int] = []
    values: list[int] = []
    labels = {}
    for number, value in _fields(message):
        if number == _SAMPLE_LABELS and isinstance(value, bytes):
            label = _integers(value)
            labels[strings[label[_LABEL_KEY]]] = strings[label.get(_LABEL_TEXT, 0)]
        elif number in (_SAMPLE_LOCATIONS, _SAMPLE_VALUES):
            numbers_of_field = locations if number == _SAMPLE_LOCATIONS else values
            numbers_of_field += _read_packed(value) if isinstance(value, bytes) else [value]
    count, total_bytes = (*map(_as_signed, values), 0, 0)[:2]
    stack = tuple(frame for location in locations for frame in frames[location])
    return Sample(max(count, 0), max(total_bytes, 0), stack, labels)


# --- the wire format of protocol buffers


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field. Raises IndexError or ValueError for damaged content."""
    offset = 0
    while offset < len(content):
        key, offset = _varint(content, offset)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, offset = _varint(content, offset)
            yield number, value
            continue
        if wire_type == 2:
            size, offset = _varint(content, offset)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if offset + size > len(content):
            raise IndexError("a field ends beyond its message")
        yield number, content[offset : offset + size]
        offset += size


def _integers(message: bytes) -> dict[int, int]:
    """Return the integer fields of a message, by field number."""
    return {number: value for number, value in _fields(message) if isinstance(value, int)}


def _read_packed(content: bytes) -> list[int]:
    """Return the numbers of a packed repeated field."""
    values, offset = [], 0
    while offset < len(content):
        value, offset = _varint(content, offset)
        values.append(value)
    return values


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    """Return the variable-length integer at a position, and the position after the integer."""
    value = shift = 0
    while True:
        byte = content[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2 * _SIGN_BIT - 1), offset
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _as_signed(value: int) -> int:
    """Return the signed number with the same 64 bits as an unsigned one."""
    return value - 2 * _SIGN_BIT if value >= _SIGN_BIT else value
