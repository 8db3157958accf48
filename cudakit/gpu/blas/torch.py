"""GEMM by torch's functions, on memory that cudakit allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cudakit.errors import Unsupported
from cudakit.gpu.api import LEGACY, Stream
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, Library, Operands
from cudakit.gpu.blas.errors import CHOOSES_ITSELF, WithoutAlgorithms, closed_error
from cudakit.gpu.blas.frameworks import Setting, attribute_setting, run_with
from cudakit.gpu.blas.torch_calls import Call, Tensors, choose_call
from cudakit.gpu.blas.vendor import CudaDevice
from cudakit.units import Unavailable

# Values that torch requires for deterministic results (aten/src/ATen/Context.cpp).
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


class TorchBlas(WithoutAlgorithms):
    """The library torch on one device."""

    library: Library = "torch"
    title = "torch"

    def __init__(self, cuda: CudaDevice, torch: Any) -> None:
        self.cuda, self.torch = cuda, torch
        self.version = str(torch.__version__)
        self.device = torch.device("cuda", cuda.ordinal)
        self._streams: dict[Stream, Any] = {
            LEGACY: torch.cuda.default_stream(
                self.device
            )  # torch's default stream is the legacy stream.
        }
        self._is_closed = False

    def stream(self, stream: Stream) -> Any:
        """Return the torch object for a stream. Raises CUDA_ERROR_INVALID_HANDLE for a destroyed stream."""
        handle = self.cuda.stream_address(stream)
        if self._is_closed:
            raise closed_error(self.library)
        if stream not in self._streams:
            self._streams[stream] = self.torch.cuda.ExternalStream(handle, device=self.device)
        return self._streams[stream]

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> TorchGemm:
        """Prepare a GEMM. Raises Unsupported if torch has no function for it, or if an algorithm is given."""
        if self._is_closed:
            raise closed_error(self.library)
        if algorithm is not None:
            raise self.selection_error()
        return TorchGemm(self, gemm, settings)

    def close(self) -> None:
        """Release the stream objects. A second call has no effect."""
        self._is_closed = True
        self._streams.clear()


class TorchGemm:
    """A prepared torch call that writes into D.

    torch allocates a cuBLAS workspace at the first call on a stream, so a warm-up call must precede a stream
    capture. torch's global settings are changed during ``enqueue`` only.
    """

    def __init__(self, blas: TorchBlas, gemm: Gemm, settings: GemmSettings) -> None:
        torch = blas.torch
        self.algorithm = Unavailable(f"torch {CHOOSES_ITSELF}")
        self._blas = blas
        self._call: Call = choose_call(torch, gemm, settings, blas.device)
        self._tensors = Tensors(torch, gemm, blas.device)
        self._framework_settings = _framework_settings(torch, gemm, settings)
        self.settings: Mapping[str, str] = MappingProxyType(
            {
                "chosen_by": "torch",
                "call": self._call.name,
                "cuda": f"CUDA {torch.version.cuda}",
                "workspace": "allocated by torch",
                "deterministic": "yes" if settings.deterministic else "no",
                **{name: str(setting.value) for name, setting in self._framework_settings.items()},
            }
        )
        self._settings_to_apply = tuple(self._framework_settings.values())
        self._is_closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue one GEMM. Raises Unsupported with torch's reason if the call fails."""
        if self._is_closed:
            raise closed_error("the torch GEMM")
        torch, call = self._blas.torch, self._call
        tensors = self._tensors.tensors_for(operands)
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


def _framework_settings(torch: Any, gemm: Gemm, settings: GemmSettings) -> dict[str, Setting]:
    """Return the settings of torch that a GEMM depends on, with the required values, by name."""
    matmul = torch.backends.cuda.matmul
    required_values: dict[str, Any] = {}
    match gemm.dtype:
        case "fp32" | "tf32":
            # torch 2.9 replaced allow_tf32 by fp32_precision; allow_tf32 now causes a warning.
            if hasattr(matmul, "fp32_precision"):
                required_values["fp32_precision"] = "tf32" if gemm.dtype == "tf32" else "ieee"
            else:
                required_values["allow_tf32"] = gemm.dtype == "tf32"
        case "fp16":
            required_values["allow_fp16_reduced_precision_reduction"] = settings.reduced_precision
            required_values |= _fp16_accumulation(torch, matmul, gemm)
        case "bf16":
            required_values["allow_bf16_reduced_precision_reduction"] = settings.reduced_precision
    required_settings = {
        name: attribute_setting(matmul, name, value) for name, value in required_values.items()
    }
    if settings.deterministic:
        required_settings["use_deterministic_algorithms"] = _deterministic_setting(torch)
    return required_settings


def _fp16_accumulation(torch: Any, matmul: Any, gemm: Gemm) -> dict[str, bool]:
    is_fp16 = gemm.accumulate == "fp16"
    if hasattr(matmul, "allow_fp16_accumulation"):
        return {"allow_fp16_accumulation": is_fp16}
    if is_fp16:
        raise Unsupported(
            f"torch {torch.__version__} has no fp16 accumulator", hint="install torch 2.7 or newer"
        )
    return {}


def _deterministic_setting(torch: Any) -> Setting:
    if os.environ.get(_WORKSPACE_VARIABLE) not in _DETERMINISTIC_WORKSPACES:
        raise Unsupported(
            f"torch is deterministic only if {_WORKSPACE_VARIABLE} is set before it starts",
            hint=f"set {_WORKSPACE_VARIABLE}={_DETERMINISTIC_WORKSPACES[0]}",
        )
    return Setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, value=True
    )
