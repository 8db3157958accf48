"""GEMM by torch's and CuPy's functions, on memory that cudakit allocated.

The frameworks see the operands in row-major order. Column-major memory read in row-major order is the
transpose, so D = op(A) op(B) is computed as Dᵀ = op(B)ᵀ op(A)ᵀ. The libraries swap the operands back, so that
cuBLAS receives the same call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from cudakit.errors import Unsupported
from cudakit.gpu.api import LEGACY, PER_THREAD, Ptr, Stream
from cudakit.gpu.api.arrays import Element
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    Algorithm,
    Gemm,
    GemmSettings,
    Library,
    Matrix,
    Operands,
)
from cudakit.gpu.blas import CHOOSES_ITSELF, WithoutAlgorithms, closed_error, is_fp8_output
from cudakit.gpu.device_array import stream_of_cupy
from cudakit.gpu.vendor import TORCH_DTYPES, CudaDevice, DeviceBytes
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class View:
    """The shape and the strides of an array, in elements. The batch dimension comes first."""

    element: Element
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size_bytes: int  # Bytes from the first element to the end of the operand.


@dataclass(frozen=True, slots=True)
class Views:
    """The operands of ``result`` (n by m) = ``left`` (n by k) @ ``right`` (k by m) + ``bias`` (m)."""

    left: View
    right: View
    result: View
    bias: View


def views(gemm: Gemm) -> Views:
    """Return row-major views of a GEMM's operands; ``bias`` is valid only if the epilogue has one."""

    def view(matrix: Matrix, shape: tuple[int, int], *, is_transposed: bool) -> View:
        strides = (1, matrix.leading) if is_transposed else (matrix.leading, 1)
        if matrix.batch == 1:
            return View(matrix.element, shape, strides, matrix.size_bytes)
        return View(
            matrix.element, (matrix.batch, *shape), (matrix.stride, *strides), matrix.size_bytes
        )

    return Views(
        left=view(gemm.b, (gemm.n, gemm.k), is_transposed=gemm.layout[1] == "t"),
        right=view(gemm.a, (gemm.k, gemm.m), is_transposed=gemm.layout[0] == "t"),
        result=view(gemm.d, (gemm.n, gemm.m), is_transposed=False),
        bias=View(gemm.bias, (gemm.m,), (1,), gemm.m * gemm.bias.size_bytes),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """A process-wide setting of a library, and the value that a GEMM requires."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any


def attribute_setting(owner: Any, name: str, value: Any) -> Setting:
    """Return the setting for an attribute of an object."""
    return Setting(partial(getattr, owner, name), partial(setattr, owner, name), value)


def run_with(settings: Sequence[Setting], work: Callable[[], object]) -> None:
    """Run ``work`` with all settings applied, and restore the previous values afterwards."""
    changed: list[tuple[Setting, Any]] = []
    try:
        for setting in settings:
            previous = setting.read()
            if previous != setting.value:
                changed.append((setting, previous))
                setting.write(setting.value)
        work()
    finally:
        for setting, previous in reversed(changed):
            setting.write(previous)


class _Framework(WithoutAlgorithms):
    """A framework on one device, with its objects for cudakit's streams."""

    library: Library

    def __init__(self, cuda: CudaDevice, module: Any, streams: dict[Stream, Any]) -> None:
        self.cuda, self.module = cuda, module
        self.version = str(module.__version__)
        self._streams = streams
        self._is_closed = False

    def stream(self, stream: Stream) -> Any:
        """Return the framework's object for a stream.

        Raises CUDA_ERROR_INVALID_HANDLE for a destroyed stream.
        """
        handle = self.cuda.stream_address(stream)
        if self._is_closed:
            raise closed_error(self.library)
        if stream not in self._streams:
            self._streams[stream] = self._external_stream(handle)
        return self._streams[stream]

    def close(self) -> None:
        """Release the stream objects. A second call has no effect."""
        self._is_closed = True
        self._streams.clear()

    def _check_can_prepare(self, algorithm: Algorithm | None) -> None:
        if self._is_closed:
            raise closed_error(self.library)
        if algorithm is not None:
            raise self.selection_error()

    def _external_stream(self, handle: int) -> Any:
        raise NotImplementedError


# --- torch --------------------------------------------------------------------------------------------------

# Values that torch requires for deterministic results (aten/src/ATen/Context.cpp).
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")

# Size requirements of _scaled_mm and _int_mm (aten/src/ATen/native/cuda/Blas.cpp).
_FP8_MULTIPLE = 16
_INT8_MULTIPLE = 8
_INT8_MIN_N = 17


class TorchBlas(_Framework):
    """The library torch on one device."""

    library: Library = "torch"
    title = "torch"

    def __init__(self, cuda: CudaDevice, torch: Any) -> None:
        self.device = torch.device("cuda", cuda.ordinal)
        # torch's default stream is the legacy stream.
        super().__init__(cuda, torch, {LEGACY: torch.cuda.default_stream(self.device)})

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> TorchGemm:
        """Prepare a GEMM. Raises Unsupported if torch has no function for it, or if an algorithm is given."""
        self._check_can_prepare(algorithm)
        return TorchGemm(self, gemm, settings)

    def _external_stream(self, handle: int) -> Any:
        return self.module.cuda.ExternalStream(handle, device=self.device)


@dataclass(frozen=True, slots=True)
class TensorSet:
    """The tensors of a GEMM: ``result`` is ``left @ right + bias``."""

    left: Any
    right: Any
    result: Any
    bias: Any  # The bias; None for a GEMM without a bias.


@dataclass(frozen=True, slots=True)
class Call:
    """A torch function: its name, and a callable that runs it on tensors."""

    name: str
    run: Callable[[TensorSet], object]


class TorchGemm:
    """A prepared torch call that writes into D.

    torch allocates a cuBLAS workspace at the first call on a stream, so a warm-up call must precede a stream
    capture. torch's global settings are changed during ``enqueue`` only.
    """

    def __init__(self, blas: TorchBlas, gemm: Gemm, settings: GemmSettings) -> None:
        torch = blas.module
        self.algorithm = Unavailable(f"torch {CHOOSES_ITSELF}")
        self._blas = blas
        self._call = choose_call(torch, gemm, settings, blas.device)
        self._views, self._has_bias = views(gemm), gemm.has_bias
        self._tensors: dict[tuple[Ptr, ...], TensorSet] = {}  # by the addresses of the operands
        torch_settings = _torch_settings(torch, gemm, settings)
        self.settings: Mapping[str, str] = MappingProxyType(
            {
                "chosen_by": "torch",
                "call": self._call.name,
                "cuda": f"CUDA {torch.version.cuda}",
                "workspace": "allocated by torch",
                "deterministic": "yes" if settings.deterministic else "no",
                **{name: str(setting.value) for name, setting in torch_settings.items()},
            }
        )
        self._settings_to_apply = tuple(torch_settings.values())
        self._is_closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue one GEMM. Raises Unsupported with torch's reason if the call fails."""
        if self._is_closed:
            raise closed_error("the torch GEMM")
        torch, call = self._blas.module, self._call
        tensors = self._tensors_of(operands)
        try:
            with torch.cuda.stream(self._blas.stream(stream)):
                run_with(self._settings_to_apply, lambda: call.run(tensors))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise Unsupported(f"{call.name} failed: {reason}") from error

    def close(self) -> None:
        """Release the tensor objects, which own no memory. A second call has no effect."""
        self._is_closed = True
        self._tensors.clear()

    def _tensors_of(self, operands: Operands) -> TensorSet:
        """Return tensors over the memory of operands, which own no memory."""
        addresses = (operands.a, operands.b, operands.d, operands.bias)
        if addresses not in self._tensors:
            of = self._views
            self._tensors[addresses] = TensorSet(
                left=self._tensor(of.left, operands.b),
                right=self._tensor(of.right, operands.a),
                result=self._tensor(of.result, operands.d),
                bias=self._tensor(of.bias, operands.bias) if self._has_bias else None,
            )
        return self._tensors[addresses]

    def _tensor(self, view: View, address: Ptr) -> Any:
        torch = self._blas.module
        memory = DeviceBytes(address, view.size_bytes)
        raw_bytes = torch.as_tensor(memory, device=self._blas.device)
        elements = raw_bytes.view(_torch_dtype(torch, view.element.name))
        return elements.as_strided(view.shape, view.strides)


def _torch_dtype(torch: Any, element: str) -> Any:
    return getattr(torch, TORCH_DTYPES[element])


def _torch_settings(torch: Any, gemm: Gemm, settings: GemmSettings) -> dict[str, Setting]:
    """Return the settings of torch that a GEMM depends on, with the required values, by name."""
    matmul = torch.backends.cuda.matmul
    required: dict[str, Any] = {}
    match gemm.dtype:
        case "fp32" | "tf32":
            # torch 2.9 replaced allow_tf32 by fp32_precision; allow_tf32 now causes a warning.
            if hasattr(matmul, "fp32_precision"):
                required["fp32_precision"] = "tf32" if gemm.dtype == "tf32" else "ieee"
            else:
                required["allow_tf32"] = gemm.dtype == "tf32"
        case "fp16":
            required["allow_fp16_reduced_precision_reduction"] = settings.reduced_precision
            if hasattr(matmul, "allow_fp16_accumulation"):
                required["allow_fp16_accumulation"] = gemm.accumulate == "fp16"
            elif gemm.accumulate == "fp16":
                raise Unsupported(
                    f"torch {torch.__version__} has no fp16 accumulator",
                    hint="install torch 2.7 or newer",
                )
        case "bf16":
            required["allow_bf16_reduced_precision_reduction"] = settings.reduced_precision
    torch_settings = {
        name: attribute_setting(matmul, name, value) for name, value in required.items()
    }
    if settings.deterministic:
        if os.environ.get(_WORKSPACE_VARIABLE) not in _DETERMINISTIC_WORKSPACES:
            raise Unsupported(
                f"torch is deterministic only if {_WORKSPACE_VARIABLE} is set before it starts",
                hint=f"set {_WORKSPACE_VARIABLE}={_DETERMINISTIC_WORKSPACES[0]}",
            )
        torch_settings["use_deterministic_algorithms"] = Setting(
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            value=True,
        )
    return torch_settings


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
            name = "bmm" if gemm.batch > 1 else "mm"
            function = getattr(torch, name)
            return Call(f"torch.{name}", lambda t: function(t.left, t.right, out=t.result))
        case "bias":
            name = "baddbmm" if gemm.batch > 1 else "addmm"
            function = getattr(torch, name)
            return Call(f"torch.{name}", lambda t: function(t.bias, t.left, t.right, out=t.result))
        case "relu-bias" | "gelu-bias":
            return _addmm_activation(torch, gemm)
    raise Unsupported(
        f"torch fuses {gemm.epilogue} only together with a bias",
        hint=f"use epilogue {gemm.epilogue}-bias",
    )


def _mm_fp32_output(torch: Any, gemm: Gemm) -> Call:
    """Return the call for 16-bit operands with fp32 output, which needs torch 2.8 for ``out_dtype``."""
    if gemm.epilogue != "none":
        raise Unsupported(
            f"torch has no epilogue {gemm.epilogue} for {gemm.dtype} to {gemm.output}",
            hint="use epilogue none",
        )
    name = "bmm" if gemm.batch > 1 else "mm"
    function, dtype = getattr(torch, name), _torch_dtype(torch, gemm.output)
    return Call(
        f"torch.{name}(out_dtype={gemm.output})",
        lambda t: function(t.left, t.right, out_dtype=dtype, out=t.result),
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
        lambda t: torch._addmm_activation(t.bias, t.left, t.right, use_gelu=is_gelu, out=t.result),
    )


def _scaled_mm(torch: Any, gemm: Gemm, settings: GemmSettings, device: Any) -> Call:
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
    unit_scale = torch.ones((), dtype=torch.float32, device=device)
    torch.cuda.synchronize(device)  # Later calls may use the scale on other streams.
    result_scale = unit_scale if is_fp8_output(gemm) else None
    dtype, fast_accumulate = _torch_dtype(torch, gemm.output), settings.fast_accumulate
    return Call(
        f"torch._scaled_mm(use_fast_accum={fast_accumulate})",
        lambda t: torch._scaled_mm(
            t.left,
            t.right,
            scale_a=unit_scale,
            scale_b=unit_scale,
            bias=t.bias,
            scale_result=result_scale,
            out_dtype=dtype,
            use_fast_accum=fast_accumulate,
            out=t.result,
        ),
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
    return Call("torch._int_mm", lambda t: torch._int_mm(t.left, t.right, out=t.result))


# --- CuPy ---------------------------------------------------------------------------------------------------

_CUPY_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}
)


class CupyBlas(_Framework):
    """The library CuPy on one device."""

    library: Library = "cupy"
    title = "CuPy"

    def __init__(self, cuda: CudaDevice, cupy: Any) -> None:
        streams = {LEGACY: cupy.cuda.Stream.null, PER_THREAD: cupy.cuda.Stream.ptds}
        super().__init__(cuda, cupy, streams)

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> CupyGemm:
        """Prepare a GEMM. Raises Unsupported if CuPy would copy operands, or if an algorithm is given."""
        self._check_can_prepare(algorithm)
        _check_supported(gemm, settings)
        return CupyGemm(self, gemm)

    def _external_stream(self, handle: int) -> Any:
        return stream_of_cupy(self.module, handle)


class CupyGemm:
    """A prepared call of cupy.matmul that writes directly into D."""

    def __init__(self, blas: CupyBlas, gemm: Gemm) -> None:
        self.algorithm = Unavailable(f"CuPy {CHOOSES_ITSELF}")
        self._blas = blas
        self._views = views(gemm)
        try:
            self._dtype = np.dtype(_CUPY_DTYPES[gemm.dtype])  # CuPy registers bf16 of ml_dtypes.
        except TypeError as error:
            raise Unsupported(
                "this CuPy does not support bf16", hint="install CuPy 14 or newer, and ml_dtypes"
            ) from error
        self._settings_to_apply = _cupy_settings(gemm)
        self._arrays: dict[tuple[Ptr, ...], list[Any]] = {}  # by the addresses of the operands
        cuda = blas.module.cuda
        with cuda.Device(blas.cuda.ordinal):
            cublas_version = str(cuda.cublas.getVersion(cuda.get_cublas_handle()))
        self.settings: Mapping[str, str] = MappingProxyType(
            {
                "chosen_by": "CuPy",
                "call": "cupy.matmul",
                "cublas": cublas_version,
                "compute_type": "TF32" if gemm.dtype == "tf32" else "CuPy default",
                "workspace": "allocated by cuBLAS",
            }
        )
        self._is_closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue one GEMM. Raises Unsupported with CuPy's reason if the call fails."""
        if self._is_closed:
            raise closed_error("the CuPy GEMM")
        cupy = self._blas.module
        try:
            with cupy.cuda.Device(self._blas.cuda.ordinal), self._blas.stream(stream):
                left, right, result = self._arrays_of(operands)
                run_with(self._settings_to_apply, lambda: cupy.matmul(left, right, out=result))
        except (RuntimeError, ValueError, TypeError) as error:
            raise Unsupported(f"cupy.matmul failed: {error}") from error

    def close(self) -> None:
        """Release the array objects, which own no memory. A second call has no effect."""
        self._is_closed = True
        self._arrays.clear()

    def _arrays_of(self, operands: Operands) -> list[Any]:
        addresses = (operands.b, operands.a, operands.d)
        if addresses not in self._arrays:
            of = self._views
            self._arrays[addresses] = list(
                map(self._array, (of.left, of.right, of.result), addresses)
            )
        return self._arrays[addresses]

    def _array(self, view: View, address: Ptr) -> Any:
        cuda = self._blas.module.cuda
        memory = cuda.UnownedMemory(int(address), view.size_bytes, self, self._blas.cuda.ordinal)
        size_bytes = view.element.size_bytes
        return self._blas.module.ndarray(
            view.shape,
            self._dtype,
            cuda.MemoryPointer(memory, 0),
            strides=tuple(stride * size_bytes for stride in view.strides),
        )


def _check_supported(gemm: Gemm, settings: GemmSettings) -> None:
    """Raise Unsupported for a GEMM that cupy.matmul cannot compute, or computes only after copying operands.

    Source: cupy/_core/_routines_linalg.pyx, ``tensordot_core`` and ``matmul``.
    """
    if reason := _rejection_reason(gemm):
        raise Unsupported(f"CuPy {reason}", hint="use another library")
    if not settings.reduced_precision and gemm.dtype in ("fp16", "bf16"):
        raise Unsupported("CuPy cannot disable reduced-precision sums", hint="use --vs torch")


def _rejection_reason(gemm: Gemm) -> str:
    if gemm.dtype not in _CUPY_DTYPES:
        return f"does not support {gemm.dtype}"
    if gemm.output != DATA_TYPES[gemm.dtype].outputs[0].name:
        return f"does not support output {gemm.output} for {gemm.dtype}"
    if gemm.accumulate == "fp16":
        return "has no fp16 accumulator"
    if gemm.epilogue != "none":
        return f"has no epilogues, but {gemm.epilogue} was requested"
    if gemm.batch > 1 and gemm.dtype == "tf32":
        return "does not support tf32 for batches"
    if gemm.padding:
        return "copies padded matrices first"
    if gemm.batch > 1 and gemm.layout != "nn":
        return f"copies batches of layout {gemm.layout} first"
    return ""


def _cupy_settings(gemm: Gemm) -> tuple[Setting, ...]:
    """Return the CuPy setting that selects fp32 or tf32, whose default depends on the variable CUPY_TF32."""
    if gemm.dtype not in ("fp32", "tf32"):
        return ()
    linalg = import_module("cupy._core._routines_linalg")
    return (
        Setting(
            read=lambda: linalg.get_compute_type(np.float32),
            write=lambda value: linalg.set_compute_type(np.float32, value),
            value=linalg.COMPUTE_TYPE_TF32 if gemm.dtype == "tf32" else linalg.COMPUTE_TYPE_DEFAULT,
        ),
    )
