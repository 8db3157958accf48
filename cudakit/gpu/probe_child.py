"""The child process of the probe: queries the CUDA driver and writes one JSON object to stdout.

The script imports only the standard library, so that it starts in milliseconds. It creates no context.
Numbers and names are those of the CUDA Driver API (cuda.h). Output of the driver goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

_SUCCESS = 0
_INVALID_VALUE = 1
# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_NATIVE_ATOMICS = 3


class DriverError(Exception):
    """The driver returned an error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Driver:
    """Functions of libcuda with checked status."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises DriverError if it fails."""
        code = getattr(self._library, name)(*arguments)
        if code != _SUCCESS:
            raise DriverError(code)

    def number(self, name: str, *arguments: Any) -> int:
        """Return the number that a function writes to its first argument."""
        result = ctypes.c_int()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def text(self, name: str, *arguments: Any) -> str:
        """Return the text that a function writes to a buffer."""
        buffer = ctypes.create_string_buffer(256)
        self.call(name, buffer, ctypes.c_int(len(buffer)), *arguments)
        return buffer.value.decode(errors="replace")

    def uuid(self, name: str, device: int) -> str:
        """Return the UUID of a device as hexadecimal digits."""
        buffer = ctypes.create_string_buffer(16)
        self.call(name, buffer, device)
        return buffer.raw.hex()

    def total_memory_bytes(self, device: int) -> int:
        """Return the size of the memory of a device."""
        size = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        return size.value

    def explain(self, code: int) -> list[Any]:
        """Return the code, name and description of an error."""
        return [
            code,
            *(self._error_text(name, code) for name in ("cuGetErrorName", "cuGetErrorString")),
        ]

    def _error_text(self, name: str, code: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._library, name)(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode(errors="replace")


def query_driver(attribute_numbers: list[int]) -> dict[str, Any]:
    """Query the driver, its devices and peers. ``attribute_numbers`` are the device attributes to read."""
    try:
        driver = Driver()
    except OSError as error:
        return {"missing": str(error)}
    result: dict[str, Any] = {
        "version": _value_or_error(driver, driver.number, "cuDriverGetVersion")
    }
    try:
        driver.call("cuInit", 0)
        result["devices"] = list(_query_devices(driver, attribute_numbers))
        result["peers"] = list(_peer_pairs(driver, len(result["devices"])))
    except DriverError as error:
        result["error"] = driver.explain(error.code)
    result["libcuda"] = _mapped_library()
    return result


def _query_devices(driver: Driver, attribute_numbers: list[int]) -> Iterator[dict[str, Any]]:
    for ordinal in range(driver.number("cuDeviceGetCount")):
        device = driver.number("cuDeviceGet", ordinal)
        # For a MIG instance, cuDeviceGetUuid returns the UUID of its GPU, cuDeviceGetUuid_v2 its own.
        yield {
            "gpu_uuid": _value_or_error(driver, driver.uuid, "cuDeviceGetUuid", device),
            "uuid": _value_or_error(driver, driver.uuid, "cuDeviceGetUuid_v2", device),
            "pci_bus_id": _value_or_error(driver, driver.text, "cuDeviceGetPCIBusId", device),
            "name": _value_or_error(driver, driver.text, "cuDeviceGetName", device),
            "memory": _value_or_error(driver, driver.total_memory_bytes, device),
            "attributes": {
                number: _attribute_value(driver, number, device) for number in attribute_numbers
            },
        }


def _attribute_value(driver: Driver, number: int, device: int) -> Any:
    try:
        return driver.number("cuDeviceGetAttribute", number, device)
    except DriverError as error:
        is_supported = error.code != _INVALID_VALUE
        return {"error": driver.explain(error.code)} if is_supported else None


def _peer_pairs(driver: Driver, device_count: int) -> Iterator[list[int]]:
    """Yield [device, peer, 1 if native peer atomics are supported, else 0] for pairs with peer access."""
    for device in range(device_count):
        for peer_ordinal in range(device_count):
            if device != peer_ordinal and driver.number(
                "cuDeviceCanAccessPeer", device, peer_ordinal
            ):
                yield [device, peer_ordinal, _has_atomics(driver, device, peer_ordinal)]


def _has_atomics(driver: Driver, device: int, peer_ordinal: int) -> int:
    try:
        return driver.number("cuDeviceGetP2PAttribute", _NATIVE_ATOMICS, device, peer_ordinal)
    except (DriverError, AttributeError):
        return 0


def _value_or_error(driver: Driver, read: Any, *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except DriverError as error:
        return {"error": driver.explain(error.code)}
    except AttributeError:
        return {"error": [-1, "", "this driver has no such function"]}


def _mapped_library() -> str | None:
    """Return the path of the loaded libcuda from /proc/self/maps."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = [line.split(maxsplit=5)[-1].strip() for line in maps]
    except OSError:
        return None
    return next((path for path in paths if os.path.basename(path).startswith("libcuda.so")), None)


def main(seconds_text: str, *attribute_numbers: str) -> None:
    """Query the driver, and write the results; SIGALRM ends the process after ``seconds_text``."""
    signal.alarm(int(seconds_text))
    output_descriptor = os.dup(1)
    os.dup2(2, 1)
    text = json.dumps(query_driver([int(number) for number in attribute_numbers]))
    with open(output_descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
