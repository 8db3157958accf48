"""Prepared launches: a kernel, its launch configuration, and the origin of each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cudakit.arrays.expressions.dtypes import DType
from cudakit.gpu.api import Argument, Dim3, Kernel, Kernels, Module, Ptr, Stream


@dataclass(frozen=True, slots=True)
class Address:
    """A parameter that is the address of an operand."""

    operand: int  # index of the operand


@dataclass(frozen=True, slots=True)
class Scalar:
    """A parameter that is the value of a scalar operand."""

    operand: int  # index of the operand
    dtype: DType


@dataclass(frozen=True, slots=True)
class Scratch:
    """A parameter that is the address of zeroed device memory. Every launch leaves the memory zeroed."""

    size_bytes: int


NO_SCRATCH = Ptr(0)
Parameter: TypeAlias = Address | Scalar | Scratch | np.generic


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch without the addresses and numbers of a call."""

    source: str
    name: str  # name of the kernel in the source
    blocks: int
    threads: int  # threads of a block
    parameters: tuple[Parameter, ...]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that the launch needs."""
        return sum(
            parameter.size_bytes for parameter in self.parameters if isinstance(parameter, Scratch)
        )


def arguments_of(
    plan: LaunchPlan, operands: Sequence[complex | np.generic], scratch: Ptr = NO_SCRATCH
) -> list[Argument]:
    """Return the arguments of a launch: ``operands`` are addresses of arrays and values of scalars."""
    arguments: list[Argument] = []
    for parameter in plan.parameters:
        match parameter:
            case Address(operand):
                arguments.append(Ptr(int(np.real(operands[operand]))))
            case Scalar(operand, dtype):
                arguments.append(scalar_argument(operands[operand], dtype))
            case Scratch():
                arguments.append(scratch)
            case _:
                arguments.append(parameter)
    return arguments


def scalar_argument(value: complex | np.generic, dtype: DType) -> np.generic:
    """Return a number as an argument of the compute type of a dtype."""
    converted_value: Any = np.asarray(value).astype(dtype.compute)
    if dtype.compute.kind != "c":
        scalar: np.generic = converted_value[()]
        return scalar
    # A complex number is passed as a struct of its bytes.
    return bytes_argument(converted_value.tobytes())


def bytes_argument(content: bytes) -> np.generic:
    """Return bytes as one argument: the value of a struct."""
    return np.void(content)


class PlannedKernels:
    """The kernels of plans on one device, compiled and loaded when they are first launched."""

    def __init__(self, gpu: Kernels) -> None:
        self.gpu = gpu
        self._modules: list[Module] = []
        self._kernels: dict[tuple[str, str], Kernel] = {}

    def kernel(self, plan: LaunchPlan) -> Kernel:
        """Return the loaded kernel of a plan."""
        key = (plan.source, plan.name)
        if key not in self._kernels:
            module = self.gpu.load(self.gpu.compile(plan.source))
            self._modules.append(module)
            self._kernels[key] = self.gpu.kernel(module, plan.name)
        return self._kernels[key]

    def launch(self, plan: LaunchPlan, arguments: Sequence[Argument], stream: Stream) -> None:
        """Enqueue a launch; a plan without blocks launches nothing."""
        if plan.blocks:
            shape: Dim3 = (plan.blocks, 1, 1)
            self.gpu.launch(self.kernel(plan), shape, (plan.threads, 1, 1), arguments, stream)

    def close(self) -> None:
        """Unload all kernels, which must have finished."""
        for module in self._modules:
            self.gpu.unload(module)
        self._modules.clear()
        self._kernels.clear()
