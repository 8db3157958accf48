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
from cudakit.stacks import Frame, Stack

# Arrays by (device, address): the size in bytes and the call stack.
Arrays: TypeAlias = dict[tuple[int, int], tuple[int, Stack]]

_MAX_BYTES = 256 << 20  # maximum size of an uncompressed profile
_NUMBER_PATTERN = re.compile(r"\d+")
_SIGN_BIT = 1 << 63

# Field numbers of profile.proto.
_SAMPLE_FIELD, _LOCATION_FIELD, _FUNCTION_FIELD, _STRING_FIELD = 2, 4, 5, 6
_SAMPLE_LOCATIONS, _SAMPLE_VALUES, _SAMPLE_LABELS = 1, 2, 3
_LABEL_KEY, _LABEL_TEXT = 1, 2
_ID_FIELD = 1  # the id of a location or of a function
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


def read_profile(compressed_profile: bytes) -> list[Sample]:
    """Return the samples of a profile, gzip-compressed or not. Raises InputError if it is damaged."""
    try:
        content = compressed_profile
        if content[:2] == b"\x1f\x8b":
            decompressor = zlib.decompressobj(wbits=31)
            content = decompressor.decompress(content, _MAX_BYTES)
            if not decompressor.eof:
                raise ValueError("it is truncated, or too large")
        return _parse_samples(content)
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
        devices = {int(of_jax): int(device) for of_jax, device in message["devices"].items()}
        addresses: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for device, address, size_bytes in message["buffers"]:
            addresses[int(device), int(size_bytes)].append(int(address))
        return int(message["time_ns"]), _addressed_arrays(samples, devices, addresses)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the memory profile of JAX cannot be read: {error}") from error


def _addressed_arrays(
    samples: Sequence[Sample],
    cuda_by_jax_device: Mapping[int, int],
    addresses_by_size: Mapping[tuple[int, int], list[int]],
) -> Arrays:
    arrays: Arrays = {}
    for sample in samples:
        numbers = _NUMBER_PATTERN.findall(sample.labels.get("device", ""))
        device = cuda_by_jax_device.get(int(numbers[-1])) if numbers else None
        if device is None or not sample.count:
            continue  # the sample is an executable, or an array in host memory
        size_bytes = sample.total_bytes // sample.count
        addresses = addresses_by_size.get((device, size_bytes), [])
        for _ in range(min(sample.count, len(addresses))):
            arrays[device, addresses.pop()] = (size_bytes, sample.stack)
    for (device, size_bytes), addresses in addresses_by_size.items():
        for address in addresses:  # the array was created after the profile
            arrays[device, address] = (size_bytes, ())
    return arrays


def _parse_samples(content: bytes) -> list[Sample]:
    messages: defaultdict[int, list[bytes]] = defaultdict(list)
    for number, value in _parse_fields(content):
        if isinstance(value, bytes):
            messages[number].append(value)
    strings = [value.decode(errors="replace") for value in messages[_STRING_FIELD]]
    function_by_id = {}
    for message in messages[_FUNCTION_FIELD]:
        fields = _integer_fields(message)
        name, file = fields.get(_FUNCTION_NAME, 0), fields.get(_FUNCTION_FILE, 0)
        function_by_id[fields[_ID_FIELD]] = strings[name], strings[file]
    frames_by_location = {
        _integer_fields(message)[_ID_FIELD]: _parse_frames(message, function_by_id)
        for message in messages[_LOCATION_FIELD]
    }
    return [
        _parse_sample(message, frames_by_location, strings) for message in messages[_SAMPLE_FIELD]
    ]


def _parse_frames(
    location_message: bytes, function_by_id: Mapping[int, tuple[str, str]]
) -> tuple[Frame, ...]:
    """Return the frames of a location: more than one if functions are inlined."""
    frames = []
    for number, value in _parse_fields(location_message):
        if number == _LOCATION_LINES and isinstance(value, bytes):
            line = _integer_fields(value)
            function, file = function_by_id[line[_LINE_FUNCTION]]
            frames.append(Frame(function, file, max(_as_signed(line.get(_LINE_NUMBER, 0)), 0)))
    return tuple(frames)


def _parse_sample(
    message: bytes, frames_by_location: Mapping[int, tuple[Frame, ...]], strings: Sequence[str]
) -> Sample:
    locations: list[int] = []
    values: list[int] = []
    labels = {}
    for number, value in _parse_fields(message):
        if number == _SAMPLE_LABELS and isinstance(value, bytes):
            label = _integer_fields(value)
            labels[strings[label[_LABEL_KEY]]] = strings[label.get(_LABEL_TEXT, 0)]
        elif number in (_SAMPLE_LOCATIONS, _SAMPLE_VALUES):
            numbers = locations if number == _SAMPLE_LOCATIONS else values
            numbers += _read_packed(value) if isinstance(value, bytes) else [value]
    count, total_bytes = (*map(_as_signed, values), 0, 0)[:2]
    stack = tuple(frame for location in locations for frame in frames_by_location[location])
    return Sample(max(count, 0), max(total_bytes, 0), stack, labels)


# --- the wire format of protocol buffers


def _parse_fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field. Raises IndexError or ValueError for damaged content."""
    offset = 0
    while offset < len(content):
        key, offset = _read_varint(content, offset)
        field_number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            field_value, offset = _read_varint(content, offset)
            yield field_number, field_value
            continue
        if wire_type == 2:
            field_bytes, offset = _read_varint(content, offset)
        elif wire_type in (1, 5):
            field_bytes = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if offset + field_bytes > len(content):
            raise IndexError("a field ends beyond its message")
        yield field_number, content[offset : offset + field_bytes]
        offset += field_bytes


def _integer_fields(message: bytes) -> dict[int, int]:
    return {number: value for number, value in _parse_fields(message) if isinstance(value, int)}


def _read_packed(content: bytes) -> list[int]:
    numbers, offset = [], 0
    while offset < len(content):
        number, offset = _read_varint(content, offset)
        numbers.append(number)
    return numbers


def _read_varint(content: bytes, offset: int) -> tuple[int, int]:
    """Return the variable-length integer at a position, and the position after the integer."""
    number = shift = 0
    while True:
        byte = content[offset]
        offset += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (2 * _SIGN_BIT - 1), offset
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _as_signed(unsigned_number: int) -> int:
    return unsigned_number - 2 * _SIGN_BIT if unsigned_number >= _SIGN_BIT else unsigned_number
