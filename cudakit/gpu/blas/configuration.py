"""The numbers of an algorithm, and the opaque structure that cuBLASLt keeps them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Algorithm
from cudakit.gpu.blas.search import NO_REDUCTION, SPLITS, Choices

# Fields of Algorithm, and what cublasLtMatmulAlgoConfigAttributes_t calls them.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "tile": "TILE_ID",
        "stages": "STAGES_ID",
        "split_k": "SPLITK_NUM",
        "reduction": "REDUCTION_SCHEME",
        "swizzle": "CTA_SWIZZLING",
        "custom": "CUSTOM_OPTION",
        "inner": "INNER_SHAPE_ID",
        "cluster": "CLUSTER_SHAPE_ID",
    }
)

# Thread block clusters came with Hopper (CUDA C++ Programming Guide, "Thread Block Clusters").
_CLUSTERS_SINCE = (9, 0)

# Some algorithms accept numbers without end, of which only the first few mean something of their own.
_MOST_CUSTOM_OPTIONS = 64


class Cell:
    """Memory for the value of one attribute, of the type that the bindings name for it."""

    def __init__(self, attribute: int, kind: type[np.generic]) -> None:
        self.attribute = attribute
        self._value = np.zeros(1, kind)
        self.address: int = self._value.ctypes.data
        self.size_bytes: int = self._value.nbytes

    @property
    def number(self) -> int:
        return int(self._value[0])

    @number.setter
    def number(self, number: int) -> None:
        self._value[0] = number


@dataclass(frozen=True, slots=True)
class Configurations:
    """Reads and writes cublasLtMatmulAlgo_t, which is given by its address."""

    lt: Any
    cells: Mapping[str, Cell]
    written: Cell

    @classmethod
    def of(cls, lt: Any) -> Configurations:
        attributes = lt.MatmulAlgoConfigAttribute
        cells = {
            field: Cell(
                attributes[name], lt.get_matmul_algo_config_attribute_dtype(attributes[name])
            )
            for field, name in {"id": "ID", **FIELDS}.items()
        }
        return cls(lt, cells, Cell(0, np.uint64))

    def read(self, address: int) -> Algorithm:
        """Return the numbers; how much workspace is needed does not stand there."""
        numbers = {field: self._read(address, cell) for field, cell in self.cells.items()}
        if numbers["split_k"] > 1:
            return Algorithm(**numbers)
        # The heuristics leave k whole by -1, beside a scheme that is refused beside 1 and means nothing.
        return Algorithm(**numbers | {"split_k": 1, "reduction": NO_REDUCTION})

    def write(self, address: int, algorithm: Algorithm) -> None:
        """Set the numbers, but for the id, which cublasLtMatmulAlgoInit has set.

        Raises Unsupported for a number that is too large to be one.
        """
        for field in FIELDS:
            cell = self.cells[field]
            try:
                cell.number = getattr(algorithm, field)
            except OverflowError:
                raise Unsupported(
                    f"{getattr(algorithm, field)} is no {field} of an algorithm of cuBLASLt"
                ) from None
            self.lt.matmul_algo_config_set_attribute(
                address, cell.attribute, cell.address, cell.size_bytes
            )

    def _read(self, address: int, cell: Cell) -> int:
        self.lt.matmul_algo_config_get_attribute(
            address, cell.attribute, cell.address, cell.size_bytes, self.written.address
        )
        return cell.number


class Capabilities:
    """What an algorithm can do, read from the structure that cublasLtMatmulAlgoInit made, at an address."""

    def __init__(self, lt: Any, address: int) -> None:
        self._lt = lt
        self._address = address
        self._written = Cell(0, np.uint64)

    def number(self, name: str) -> int:
        """Return the value of an attribute, as ``SPLITK_SUPPORT``."""
        cell = Cell(*self._attribute(name))
        self._get(cell.attribute, cell.address, cell.size_bytes)
        return cell.number

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the values of an attribute that has many, as ``TILE_IDS``."""
        attribute, kind = self._attribute(name)
        self._get(attribute, 0, 0)
        values = np.zeros(self._written.number // np.dtype(kind).itemsize, kind)
        if values.size:
            self._get(attribute, values.ctypes.data, values.nbytes)
        return tuple(values.tolist())

    def _attribute(self, name: str) -> tuple[int, type[np.generic]]:
        attribute = self._lt.MatmulAlgoCapAttribute[name]
        return attribute, self._lt.get_matmul_algo_cap_attribute_dtype(attribute)

    def _get(self, attribute: int, address: int, size_bytes: int) -> None:
        self._lt.matmul_algo_cap_get_attribute(
            self._address, attribute, address, size_bytes, self._written.address
        )


def choices(
    lt: Any, algorithm_id: int, address: int, allowed: Sequence[int], capability: tuple[int, int]
) -> Choices:
    """Read what an algorithm can be configured with; of reduction schemes only ``allowed`` ones."""
    able = Capabilities(lt, address)
    schemes = able.number("REDUCTION_SCHEME_MASK")
    most_custom = min(able.number("CUSTOM_OPTION_MAX"), _MOST_CUSTOM_OPTIONS)
    return Choices(
        id=algorithm_id,
        tiles=able.numbers("TILE_IDS") or (0,),
        stages=able.numbers("STAGES_IDS") or (0,),
        customs=range(max(most_custom, 0) + 1),
        swizzles=(0, 1) if able.number("CTA_SWIZZLING_SUPPORT") else (0,),
        splits=SPLITS if able.number("SPLITK_SUPPORT") else (),
        reductions=tuple(scheme for scheme in allowed if scheme & schemes),
        clusters=_sorted(lt.ClusterShape) if capability >= _CLUSTERS_SINCE else (0,),
        inners=_sorted(lt.MatmulInnerShape),
    )


def _sorted(shapes: Any) -> tuple[int, ...]:
    return tuple(sorted({int(shape) for shape in shapes}))
