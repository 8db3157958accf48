"""Fake bindings of cuBLASLt and cuBLAS that record their calls and compute nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any

import numpy as np

from cudakit.gpu.api import Stream
from cudakit.gpu.sim import Sim
from cudakit.gpu.vendor import Nvmath

CONFIG = ("id", "tile", "split_k", "reduction", "swizzle", "custom", "stages", "inner", "cluster")
CAPABILITIES = {
    "SPLITK_SUPPORT": 1,
    "REDUCTION_SCHEME_MASK": 7,
    "CTA_SWIZZLING_SUPPORT": 1,
    "TILE_IDS": (15, 20),
    "CUSTOM_OPTION_MAX": 1,
    "STAGES_IDS": (),
}


class Device(Sim):
    """A simulated device with the additional methods that the libraries need of a real one."""

    def in_context(self, function: Callable[..., Any], *args: object) -> Any:
        return function(*args)

    def stream_address(self, stream: Stream) -> int:
        return 0x1000 + stream


@dataclass(frozen=True)
class Places:
    """Operands at addresses that are never read."""

    a: int = 0x100
    b: int = 0x200
    d: int = 0x300
    bias: int = 0x400


class FakeError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def _enumeration(*names: str) -> type[IntEnum]:
    return IntEnum("Names", {name: number for number, name in enumerate(names)})


class FakeLt:
    """cuBLASLt. ``answer`` returns the workspace size of a configuration, or None if unsupported."""

    cuBLASLtError = FakeError  # noqa: N815
    matmul_algo_dtype = np.dtype([("data_", "<u8", (9,))])
    matmul_heuristic_result_dtype = np.dtype(
        [("algo", matmul_algo_dtype), ("workspace_size", "<u8"), ("state", "<i4")]
    )
    MatmulDescAttribute = _enumeration(
        "TRANSA", "TRANSB", "EPILOGUE", "BIAS_DATA_TYPE", "BIAS_POINTER", "A_SCALE_POINTER",
        "B_SCALE_POINTER", "D_SCALE_POINTER", "FAST_ACCUM",
    )  # fmt: skip
    MatrixLayoutAttribute = _enumeration("BATCH_COUNT", "STRIDED_BATCH_OFFSET")
    MatmulPreferenceAttribute = _enumeration(
        "MAX_WORKSPACE_BYTES", "REDUCTION_SCHEME_MASK",
        *(f"MIN_ALIGNMENT_{matrix}_BYTES" for matrix in "ABCD"),
    )  # fmt: skip
    MatmulAlgoConfigAttribute = _enumeration(
        "ID", "TILE_ID", "SPLITK_NUM", "REDUCTION_SCHEME", "CTA_SWIZZLING", "CUSTOM_OPTION",
        "STAGES_ID", "INNER_SHAPE_ID", "CLUSTER_SHAPE_ID",
    )  # fmt: skip
    MatmulAlgoCapAttribute = _enumeration(*CAPABILITIES)
    Epilogue = _enumeration("DEFAULT", "BIAS", "RELU", "GELU", "RELU_BIAS", "GELU_BIAS")
    ClusterShape = _enumeration("AUTO", "ONE", "TWO")
    MatmulInnerShape = _enumeration("UNDEFINED", "MMA884")

    def __init__(self, answer: Callable[[dict[str, int]], int | None] = lambda _: 0) -> None:
        self._answer = answer
        self._numbers = count(1)
        self.alive: dict[int, dict[str, int]] = {}
        self.ids = (66, 67)
        self.products: list[tuple[Any, ...]] = []

    def get_property(self, component: int) -> int:
        return (13, 10, 0)[component]

    def create(self) -> int:
        return self._new()

    def destroy(self, handle: int) -> None:
        del self.alive[handle]

    # --- descriptors
    def matmul_desc_create(self, compute: int, scale: int) -> int:
        return self._new(compute=compute, scale=scale)

    def matrix_layout_create(self, kind: int, rows: int, columns: int, leading: int) -> int:
        return self._new(type=kind, rows=rows, columns=columns, leading=leading)

    def matmul_preference_create(self) -> int:
        return self._new()

    matmul_desc_destroy = matrix_layout_destroy = matmul_preference_destroy = destroy

    def get_matmul_desc_attribute_dtype(self, attribute: IntEnum) -> type[np.generic]:
        pointer = attribute.name.endswith("POINTER")
        return np.int64 if pointer else np.int8 if attribute.name == "FAST_ACCUM" else np.int32

    def get_matrix_layout_attribute_dtype(self, attribute: IntEnum) -> type[np.generic]:
        return np.int32 if attribute.name == "BATCH_COUNT" else np.int64

    def get_matmul_preference_attribute_dtype(self, attribute: IntEnum) -> type[np.generic]:
        return np.uint64 if attribute.name == "MAX_WORKSPACE_BYTES" else np.uint32

    def matmul_desc_set_attribute(
        self, object_id: int, attribute_id: IntEnum, value_address: int, size: int
    ) -> None:
        self.alive[object_id][attribute_id.name] = _read(value_address, size)

    matrix_layout_set_attribute = matmul_preference_set_attribute = matmul_desc_set_attribute

    # --- algorithms
    def get_matmul_algo_config_attribute_dtype(self, attribute: IntEnum) -> type[np.generic]:
        return np.uint16 if attribute.name.endswith("SHAPE_ID") else np.int32

    def get_matmul_algo_cap_attribute_dtype(self, _: IntEnum) -> type[np.generic]:
        return np.uint32

    def matmul_algo_get_ids(self, *_: int) -> tuple[int, ...]:
        return self.ids

    def matmul_algo_init(self, *arguments: int) -> None:
        number, value_address = arguments[-2:]
        if number not in self.ids:
            raise FakeError(15)
        _words(value_address)[:] = 0
        _words(value_address)[0] = number

    def matmul_algo_config_set_attribute(
        self, object_id: int, attribute_id: int, value_address: int, size: int
    ) -> None:
        _words(object_id)[attribute_id] = _read(value_address, size)

    def matmul_algo_config_get_attribute(
        self, object_id: int, attribute_id: int, value_address: int, size: int, written: int
    ) -> None:
        value = int(_words(object_id)[attribute_id])
        ctypes.memmove(value_address, value.to_bytes(size, "little"), size)
        ctypes.memmove(written, size.to_bytes(8, "little"), 8)

    def matmul_algo_cap_get_attribute(
        self, object_id: int, attribute_id: IntEnum, value_address: int, size: int, written: int
    ) -> None:
        assert _words(object_id)[0] in self.ids
        capability = CAPABILITIES[attribute_id.name]
        values = np.array(capability if isinstance(capability, tuple) else (capability,), np.uint32)
        ctypes.memmove(value_address or written, values.tobytes(), min(size, values.nbytes))
        ctypes.memmove(written, values.nbytes.to_bytes(8, "little"), 8)

    def matmul_algo_check(self, *arguments: int) -> None:
        algorithm, result_address = arguments[-2:]
        workspace_bytes = self._answer(self._configured(algorithm))
        if workspace_bytes is None:
            raise FakeError(15)
        result = _array(result_address, self.matmul_heuristic_result_dtype, 1)
        result["workspace_size"], result["state"] = workspace_bytes, 0

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        preference, max_results, results_address, count_address = arguments[-4:]
        assert preference in self.alive
        results = _array(results_address, self.matmul_heuristic_result_dtype, max_results)
        result_count = 0
        for number in self.ids[:max_results]:
            configuration = dict.fromkeys(CONFIG, 0) | {"id": number, "tile": 20}
            if (workspace_bytes := self._answer(configuration)) is not None:
                results[result_count]["algo"]["data_"][:] = list(configuration.values())
                results[result_count]["workspace_size"] = workspace_bytes
                result_count += 1
        _array(count_address, np.dtype(np.int32), 1)[0] = result_count
        if not result_count:
            raise FakeError(15)

    def matmul(self, *arguments: int) -> None:
        _, operation, alpha, _, _, _, _, beta = arguments[:8]
        assert (_read(alpha, 4), _read(beta, 4)) != (0, 0)
        bias = self.alive[operation].get("BIAS_POINTER")
        self.products.append((*arguments, bias))

    def _configured(self, algorithm_at: int) -> dict[str, int]:
        return dict(zip(CONFIG, _words(algorithm_at).tolist(), strict=True))

    def _new(self, **fields: int) -> int:
        number = next(self._numbers)
        self.alive[number] = fields
        return number


class FakeCublas:
    """cuBLAS, with the state of its handle."""

    cuBLASError = FakeError  # noqa: N815
    ComputeType = _enumeration(
        "COMPUTE_16F", "COMPUTE_32F", "COMPUTE_32F_FAST_TF32", "COMPUTE_64F", "COMPUTE_32I"
    )
    Operation = _enumeration("N", "T")
    AtomicsMode = _enumeration("NOT_ALLOWED", "ALLOWED")
    GemmAlgo = IntEnum("GemmAlgo", {"DFALT": -1})
    Math = IntEnum("Math", {"DEFAULT_MATH": 0, "DISALLOW_REDUCED_PRECISION_REDUCTION": 16})

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def get_property(self, component: int) -> int:
        return (13, 10, 0)[component]

    def create(self) -> int:
        return 7

    def destroy(self, handle: int) -> None:
        self.state["destroyed"] = handle

    def set_atomics_mode(self, _: int, mode: int) -> None:
        self.state["atomics"] = mode

    def set_stream(self, _: int, stream: int) -> None:
        self.state |= {"stream": stream, "workspace": None}

    def set_workspace(self, _: int, address: int, size_bytes: int) -> None:
        self.state["workspace"] = (address, size_bytes)

    def set_math_mode(self, _: int, mode: int) -> None:
        self.state["math"] = mode

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("gemm"):
            raise AttributeError(name)
        return lambda *arguments: self.calls.append((name, arguments, {**self.state}))


DATA_TYPES = _enumeration(
    "CUDA_R_64F", "CUDA_R_32F", "CUDA_R_16F", "CUDA_R_16BF", "CUDA_R_8F_E4M3", "CUDA_R_8F_E5M2",
    "CUDA_R_8I", "CUDA_R_32I",
)  # fmt: skip


def vendor(lt: FakeLt | None = None, cublas: FakeCublas | None = None) -> Nvmath:
    return Nvmath(lt or FakeLt(), cublas or FakeCublas(), DATA_TYPES)


def _read(value_address: int, size: int) -> int:
    return int.from_bytes(ctypes.string_at(value_address, size), "little")


def _array(value_address: int, kind: np.dtype[Any], length: int) -> Any:
    memory = (ctypes.c_ubyte * (kind.itemsize * length)).from_address(value_address)
    return np.frombuffer(memory, kind)


def _words(algorithm_at: int) -> Any:
    return _array(algorithm_at, np.dtype(np.uint64), 9)
