"""The choice of a torch function for a GEMM, and tensors over memory that torch does not own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cudakit.errors import Unsupported
from cudakit.gpu.api import Ptr
from cudakit.gpu.api.gemm import DATA_TYPES, Gemm, GemmSettings, Operands
from cudakit.gpu.blas.frameworks import View, views
from cudakit.gpu.blas.types import is_fp8_output

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

# Size requirements of _scaled_mm and _int_mm (aten/src/ATen/native/cuda/Blas.cpp).
_FP8_MULTIPLE = 16
_INT8_MULTIPLE = 8
_INT8_MIN_N = 17


@dataclass(frozen=True, slots=True)
class TensorSet:
    """The tensors of a GEMM: ``result`` is ``left @ right + bias``."""

    left: Any
    right: Any
    result: Any
    bias: Any  # The bias; None for a GEMM without a bias.


class Tensors:
    """Tensors over the operands of a GEMM, cached by their addresses."""

    def __init__(self, torch: Any, gemm: Gemm, device: Any) -> None:
        self._torch, self._device = torch, device
        self._views = views(gemm)
        self._has_bias = gemm.has_bias
        self._tensors_by_addresses: dict[tuple[Ptr, ...], TensorSet] = {}

    def tensors_for(self, operands: Operands) -> TensorSet:
        """Return tensors over the memory of operands, which own no memory."""
        addresses = (operands.a, operands.b, operands.d, operands.bias)
        tensors = self._tensors_by_addresses.get(addresses)
        if tensors is None:
            tensors = self._tensors_by_addresses[addresses] = self._create(operands)
        return tensors

    def clear(self) -> None:
        self._tensors_by_addresses.clear()

    def _create(self, operands: Operands) -> TensorSet:
        operand_views = self._views
        return TensorSet(
            left=self._tensor(operand_views.left, operands.b),
            right=self._tensor(operand_views.right, operands.a),
            result=self._tensor(operand_views.result, operands.d),
            bias=self._tensor(operand_views.bias, operands.bias) if self._has_bias else None,
        )

    def _tensor(self, view: View, address: Ptr) -> Any:
        memory = _DeviceBytes(address, view.size_bytes)
        raw_bytes = self._torch.as_tensor(memory, device=self._device)
        elements = raw_bytes.view(dtype(self._torch, view.element.name))
        return elements.as_strided(view.shape, view.strides)


def dtype(torch: Any, element: str) -> Any:
    """Return the torch dtype of an element type."""
    return getattr(torch, DTYPES[element])


class _DeviceBytes:
    """A range of device memory as an array of bytes (CUDA Array Interface, version 3)."""

    def __init__(self, address: Ptr, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (int(address), False),
            "strides": None,
            "version": 3,
        }


@dataclass(frozen=True, slots=True)
class Call:
    """A torch function: its name, and a callable that runs it on tensors."""

    name: str
    run: Callable[[TensorSet], object]


def choose_call(torch: Any, gemm: Gemm, settings: GemmSettings, device: Any) -> Call:
    """Return the torch function for a GEMM. Raises Unsupported, with the reason, if there is none."""
    if gemm.dtype.startswith("fp8"):
        return _scaled_mm(torch, gemm, settings, device)
    if gemm.dtype == "int8":
        return _int_mm(torch, gemm)
    if gemm.output != DATA_TYPES[gemm.dtype].outputs[0].name:
        return _mm_fp32_output(torch, gemm)
    match gemm.epilogue:
        case "none":
            return _mm(torch, gemm)
        case "bias":
            return _addmm(torch, gemm)
        case "relu-bias" | "gelu-bias":
            return _addmm_activation(torch, gemm)
    raise Unsupported(
        f"torch fuses {gemm.epilogue} only together with a bias",
        hint=f"use epilogue {gemm.epilogue}-bias",
    )


def _mm(torch: Any, gemm: Gemm) -> Call:
    if gemm.batch > 1:
        return Call(
            "torch.bmm", lambda tensors: torch.bmm(tensors.left, tensors.right, out=tensors.result)
        )
    return Call(
        "torch.mm", lambda tensors: torch.mm(tensors.left, tensors.right, out=tensors.result)
    )


def _mm_fp32_output(torch: Any, gemm: Gemm) -> Call:
    """Return the call for 16-bit operands with fp32 output, which needs torch 2.8 for ``out_dtype``."""
    if gemm.epilogue != "none":
        raise Unsupported(
            f"torch has no epilogue {gemm.epilogue} for {gemm.dtype} to {gemm.output}",
            hint="use epilogue none",
        )
    name = "bmm" if gemm.batch > 1 else "mm"
    function, output_dtype = getattr(torch, name), dtype(torch, gemm.output)
    return Call(
        f"torch.{name}(out_dtype={gemm.output})",
        lambda tensors: function(
            tensors.left, tensors.right, out_dtype=output_dtype, out=tensors.result
        ),
    )


def _addmm(torch: Any, gemm: Gemm) -> Call:
    if gemm.batch > 1:
        return Call(
            "torch.baddbmm",
            lambda tensors: torch.baddbmm(
                tensors.bias, tensors.left, tensors.right, out=tensors.result
            ),
        )
    return Call(
        "torch.addmm",
        lambda tensors: torch.addmm(tensors.bias, tensors.left, tensors.right, out=tensors.result),
    )


def _addmm_activation(torch: Any, gemm: Gemm) -> Call:
    """Return the call with a fused bias and activation; its GELU is the tanh form, as in cuBLASLt."""
    if gemm.batch > 1:
        raise Unsupported(
            f"torch does not fuse {gemm.epilogue} into a batch, but batch {gemm.batch} was requested",
            hint="use batch 1",
        )
    is_gelu = gemm.epilogue.startswith("gelu")
    return Call(
        f"torch._addmm_activation(use_gelu={is_gelu})",
        lambda tensors: torch._addmm_activation(
            tensors.bias, tensors.left, tensors.right, use_gelu=is_gelu, out=tensors.result
        ),
    )


def _scaled_mm(torch: Any, gemm: Gemm, settings: GemmSettings, device: Any) -> Call:
    _check_scaled_mm(gemm)
    unit_scale = torch.ones((), dtype=torch.float32, device=device)
    torch.cuda.synchronize(device)  # Later calls may use the scale on other streams.
    result_scale = unit_scale if is_fp8_output(gemm) else None
    output_dtype, fast_accumulate = dtype(torch, gemm.output), settings.fast_accumulate
    return Call(
        f"torch._scaled_mm(use_fast_accum={fast_accumulate})",
        lambda tensors: torch._scaled_mm(
            tensors.left,
            tensors.right,
            scale_a=unit_scale,
            scale_b=unit_scale,
            bias=tensors.bias,
            scale_result=result_scale,
            out_dtype=output_dtype,
            use_fast_accum=fast_accumulate,
            out=tensors.result,
        ),
    )


def _check_scaled_mm(gemm: Gemm) -> None:
    if gemm.layout != "tn":
        raise Unsupported(
            f"torch supports only layout tn for {gemm.dtype}, but {gemm.layout} was requested",
            hint="use layout tn",
        )
    if gemm.epilogue not in ("none", "bias") or gemm.batch > 1:
        raise Unsupported(
            f"torch supports only batch 1 and epilogue none or bias for {gemm.dtype}; "
            f"batch {gemm.batch} and epilogue {gemm.epilogue} were requested",
            hint="use epilogue none and batch 1",
        )
    if gemm.has_bias and gemm.output == "fp32":
        raise Unsupported(
            f"torch adds no bias to {gemm.dtype} with output fp32", hint="use output bf16"
        )
    if gemm.k % _FP8_MULTIPLE or gemm.m % _FP8_MULTIPLE:
        raise Unsupported(
            f"torch needs multiples of {_FP8_MULTIPLE} for m and k with {gemm.dtype}, "
            f"got {gemm.m} and {gemm.k}"
        )


def _int_mm(torch: Any, gemm: Gemm) -> Call:
    if gemm.epilogue != "none" or gemm.batch > 1 or gemm.padding:
        raise Unsupported(
            f"torch supports only epilogue none, batch 1 and padding 0 for int8; "
            f"epilogue {gemm.epilogue}, batch {gemm.batch} and padding {gemm.padding} were requested",
            hint="use epilogue none, batch 1 and padding 0",
        )
    if gemm.n < _INT8_MIN_N or gemm.k % _INT8_MULTIPLE or gemm.m % _INT8_MULTIPLE:
        raise Unsupported(
            f"torch needs n of at least {_INT8_MIN_N} and multiples of {_INT8_MULTIPLE} for m and k of int8, "
            f"got {gemm.m}×{gemm.n}×{gemm.k}"
        )
    return Call(
        "torch._int_mm",
        lambda tensors: torch._int_mm(tensors.left, tensors.right, out=tensors.result),
    )
