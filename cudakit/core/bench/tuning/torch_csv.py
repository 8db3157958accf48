"""Tuned algorithms in the file format of ``torch.cuda.tunable``, which is experimental.

The names are those of torch 2.15 (its wheel, ATen/cuda/tunable: TunableGemm.h, GemmCommon.h, GemmCublaslt.h).
It names products as cuBLAS does, column-major, as we do: ``torch.mm`` of rows has its factors exchanged.
A file has no comments: torch takes every line for one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from cudakit.core.bench.load import read_text
from cudakit.core.bench.tuning.tuned import Tuned, TunedMachine, TunedProduct
from cudakit.errors import InputError
from cudakit.gpu.api.gemm import DATA_TYPES, Algorithm, Gemm
from cudakit.units import Unavailable

# Validators of every file of a torch that tunes cuBLASLt.
_TORCH, _LIBRARY = "PT_VERSION", "CUBLASLT_VERSION"
_TYPES = MappingProxyType(
    {"fp64": "double", "fp32": "float", "tf32": "tf32", "fp16": "Half", "bf16": "BFloat16"}
)
_HOW_TO_WRITE = "write one by running torch with PYTORCH_TUNABLEOP_ENABLED=1"
_OPERATIONS = MappingProxyType({"none": "GemmTunableOp", "bias": "GemmAndBiasTunableOp"})


@dataclass(frozen=True, slots=True)
class TorchCsv:
    """A file for torch, and the GEMMs that it cannot express."""

    lines: tuple[str, ...]
    left_out: tuple[tuple[Gemm, str], ...]  # products, and why

    @property
    def text(self) -> str:
        """The file."""
        return "".join(f"{line}\n" for line in self.lines)


def torch_csv(tuned: Tuned, validators: Mapping[str, str]) -> TorchCsv:
    """Return the algorithms that beat the default; for all others torch uses its own choice."""
    lines = [f"Validator,{name},{value}" for name, value in validators.items()]
    left_out: list[tuple[Gemm, str]] = []
    for product in tuned.products:
        if not product.significant:
            continue
        reason = next(_reasons(product), "")
        if reason:
            left_out.append((product.gemm, reason))
        else:
            lines.append(_line(product))
    return TorchCsv(tuple(lines), tuple(left_out))


def check_validators(validators: Mapping[str, str], machine: TunedMachine) -> None:
    """Raise InputError for validators that torch would reject or interpret differently.

    The parameters of an algorithm are valid within one version of the library only.
    """
    for name in (_TORCH, _LIBRARY):
        if name not in validators:
            raise InputError(
                f"the validators of torch name no {name}, as those of torch 2.15 and newer do",
                hint="take them from a torch 2.15 or newer for CUDA",
            )
    of_torch, ours = _version(validators[_LIBRARY]), _version(machine.library_version)
    if of_torch is not None and ours is not None and of_torch != ours:
        raise InputError(
            f"torch uses cuBLASLt {validators[_LIBRARY]}, and tuned is {machine.library_version}",
            hint="tune with the nvidia-cublas that torch was installed with",
        )


def read_validators(path: Path) -> Mapping[str, str]:
    """Read the validators of a file that torch.cuda.tunable wrote. Raises InputError."""
    lines = read_text(path, hint=_HOW_TO_WRITE).splitlines()
    parts = [line.split(",", 2) for line in lines if line.startswith("Validator,")]
    found = {part[1]: part[2].strip() for part in parts if len(part) == 3}
    if not found:
        raise InputError(
            f"{path} has no line that begins with Validator,",
            hint=_HOW_TO_WRITE,
        )
    return found


def _line(product: TunedProduct) -> str:
    seconds = product.winner_s
    known = [] if isinstance(seconds, Unavailable) else [f"{seconds * 1e3:.6g}"]
    gemm = product.gemm
    return ",".join((_operation(gemm), _parameters(gemm), solution(product.winner), *known))


def _operation(gemm: Gemm) -> str:
    name = "GemmStridedBatchedTunableOp" if gemm.batch > 1 else _OPERATIONS[gemm.epilogue]
    return f"{name}_{_TYPES[gemm.dtype]}_{gemm.layout.upper()}"


def _parameters(gemm: Gemm) -> str:
    sizes = f"{gemm.layout}_{gemm.m}_{gemm.n}_{gemm.k}"
    batch = f"_B_{gemm.batch}" if gemm.batch > 1 else ""
    return f"{sizes}{batch}_ld_{gemm.a.leading}_{gemm.b.leading}_{gemm.d.leading}"


def solution(algorithm: Algorithm) -> str:
    """Return the name of an algorithm in torch."""
    numbers: Sequence[tuple[str, int]] = (
        ("id", algorithm.id),
        ("tile", algorithm.tile),
        ("stages", algorithm.stages),
        ("splitk", algorithm.split_k),
        ("red", algorithm.reduction),
        ("swizzle", algorithm.swizzle),
        ("custom", algorithm.custom),
        ("inner", algorithm.inner),
        ("cluster", algorithm.cluster),
    )
    return "_".join(["Gemm_Cublaslt", *(f"{name}_{number}" for name, number in numbers)])


def _reasons(product: TunedProduct) -> Iterator[str]:
    """Yield the properties of a GEMM that torch cannot express."""
    gemm = product.gemm
    kind = DATA_TYPES[gemm.dtype]
    if gemm.dtype not in _TYPES:
        yield f"torch names products in {gemm.dtype} by their scales as well"
    if gemm.epilogue not in _OPERATIONS:
        yield f"torch does not tell {gemm.epilogue} from other epilogues"
    if gemm.batch > 1 and gemm.epilogue != "none":
        yield "torch has no batch with a bias"
    if gemm.padding:
        yield "it has padding"
    if gemm.output != kind.outputs[0].name:
        yield f"its output is {gemm.output}"
    if gemm.accumulate != kind.accumulators[0]:
        yield f"its sums are in {gemm.accumulate}"


def _version(text: str) -> tuple[int, ...] | None:
    """Parse 13.1.0, or 130100 as of cublasLtGetVersion; None for anything else."""
    if text.isdecimal() and int(text) >= 10_000:
        number = int(text)
        return number // 10_000, number // 100 % 100, number % 100
    parts = text.split(".")[:3]
    return tuple(map(int, parts)) if len(parts) == 3 and all(map(str.isdecimal, parts)) else None
