"""torch's tensors over memory that is not torch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cudakit.gpu.api import Ptr
from cudakit.gpu.api.gemm import Gemm, Operands
from cudakit.gpu.blas.views import View, views

DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "fp64": "float64",
        "fp32": "float32",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
        "int8": "int8",
        "int32": "int32",
    }
)


@dataclass(frozen=True, slots=True)
class TensorSet:
    """The operands of one product: ``left`` times ``right``, plus ``bias``, goes to ``result``."""

    left: Any
    right: Any
    result: Any
    bias: Any  # None where there is none


class Tensors:
    """Tensors over the operands of a product, made once for each place where these are."""

    def __init__(self, torch: Any, gemm: Gemm, device: Any) -> None:
        self._torch, self._device = torch, device
        self._views = views(gemm)
        self._has_bias = gemm.has_bias
        self._known: dict[tuple[Ptr, ...], TensorSet] = {}

    def of(self, operands: Operands) -> TensorSet:
        """Return the tensors over operands, which own nothing and copy nothing."""
        places = (operands.a, operands.b, operands.d, operands.bias)
        known = self._known.get(places)
        if known is None:
            known = self._known[places] = self._made(operands)
        return known

    def clear(self) -> None:
        self._known.clear()

    def _made(self, operands: Operands) -> TensorSet:
        seen = self._views
        return TensorSet(
            left=self._tensor(seen.left, operands.b),
            right=self._tensor(seen.right, operands.a),
            result=self._tensor(seen.result, operands.d),
            bias=self._tensor(seen.bias, operands.bias) if self._has_bias else None,
        )

    def _tensor(self, view: View, place: Ptr) -> Any:
        memory = _Memory(place, view.size_bytes)
        octets = self._torch.as_tensor(memory, device=self._device)
        elements = octets.view(dtype(self._torch, view.element.name))
        return elements.as_strided(view.shape, view.strides)


def dtype(torch: Any, element: str) -> Any:
    """Return torch's type of elements."""
    return getattr(torch, DTYPES[element])


class _Memory:
    """Bytes of the device (CUDA Array Interface, version 3)."""

    def __init__(self, place: Ptr, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (int(place), False),
            "strides": None,
            "version": 3,
        }
