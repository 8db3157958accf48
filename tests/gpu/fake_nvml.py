"""nvidia-ml-py without a driver: the constants and classes of pynvml, with results given by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import pointer
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
UINT = 1  # NVML_VALUE_TYPE_UNSIGNED_INT


def refuse(code: int) -> Callable[..., Any]:
    """Return a function that raises an NVMLError."""

    def function(*_: object) -> Any:
        raise pynvml.NVMLError(code)

    return function


def gpu(**answers: Any) -> dict[str, Any]:
    """Return the results of one GPU by function name; a result may be a function to call."""
    return {
        "nvmlDeviceGetUUID": "GPU-11111111-2222-3333-4444-555555555555",
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetPciInfo": SimpleNamespace(
            busId="00000000:65:00.0", pciDeviceId=0x233510DE, pciSubSystemId=0x18BF10DE
        ),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=1000, used=300, free=600, reserved=100),
        "nvmlDeviceGetMigMode": [0, 0],
        **answers,
    }


@dataclass
class FakeNvml:
    """A replacement for the module ``pynvml``; a handle is the index of a GPU, or a pair for MIG."""

    gpus: list[dict[str, Any]]
    instances: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    # Values by field id, without its prefix NVML_FI_DEV_.
    values: Mapping[str, Any] = field(default_factory=dict)
    init: int = 0  # error code of nvmlInit; 0 for success
    calls: list[str] = field(default_factory=list)

    NVMLError = pynvml.NVMLError
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init:
            raise pynvml.NVMLError(self.init)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlSystemGetNVMLVersion(self) -> str:  # noqa: N802
        return "13.580.159.04"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        gpu = self.gpus[index]
        if isinstance(gpu.get("handle"), int):
            raise pynvml.NVMLError(gpu["handle"])
        return index

    def nvmlDeviceGetMigDeviceHandleByIndex(self, parent: int, index: int) -> tuple[int, int]:  # noqa: N802
        if (parent, index) not in self.instances:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return parent, index

    def nvmlDeviceGetFieldValues(self, _: object, ids: list[tuple[int, int]]) -> list[Any]:  # noqa: N802
        self.calls.append(f"nvmlDeviceGetFieldValues({len(ids)})")
        return [self._value(number) for number, _ in ids]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or not callable(getattr(pynvml, name, None)):
            return getattr(pynvml, name)
        return lambda handle, *arguments: self._answer(name, handle, arguments)

    def _answer(self, name: str, handle: Any, arguments: tuple[Any, ...]) -> Any:
        self.calls.append(name)
        answers = self.instances[handle] if isinstance(handle, tuple) else self.gpus[handle]
        result = answers.get(name, refuse(NOT_SUPPORTED))
        return result(handle, *arguments) if callable(result) else result

    def _value(self, number: int) -> Any:
        name = next(
            name
            for name in vars(pynvml)
            if name.startswith("NVML_FI_DEV_") and getattr(pynvml, name) == number
        )
        value = pynvml.c_nvmlFieldValue_t()
        number = self.values.get(name.removeprefix("NVML_FI_DEV_"))
        value.nvmlReturn = 0 if number is not None else NOT_SUPPORTED
        value.valueType = UINT
        value.value.uiVal = number or 0
        return pointer(value)[0]
