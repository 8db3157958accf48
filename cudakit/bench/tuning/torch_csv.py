"""Tuned algorithms in the experimental file format of ``torch.cuda.tunable``.

The names are those of torch 2.15 (ATen/cuda/tunable in its wheel: TunableGemm.h, GemmCommon.h,
GemmCublaslt.h). GEMMs are column-major as in cuBLAS, so ``torch.mm`` of row-major matrices has exchanged
operands. The format has no comments: torch parses every line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from cudakit.bench.tuning.tuned import Tuned, TunedGemm, TunedMachine
from cudakit.errors import InputError
from cudakit.gpu.api.gemm import DATA_TYPES, Algorithm, Gemm
from cudakit.input_files import ExpectedFile, read_text
from cudakit.units import Unavailable

# Validators that must be in the file. torch checks that their values are those of its own versions.
_TORCH_VALIDATOR, _LIBRARY_VALIDATOR = "PT_VERSION", "CUBLASLT_VERSION"
_TYPE_NAMES = MappingProxyType(
    {"fp64": "double", "fp32": "float", "tf32": "tf32", "fp16": "Half", "bf16": "BFloat16"}
)
_VALIDATORS_FILE = ExpectedFile(
    "a file of torch.cuda.tunable",
    "run torch with PYTORCH_TUNABLEOP_ENABLED=1, which writes such a file",
)
_OPERATOR_BY_EPILOGUE = MappingProxyType({"none": "GemmTunableOp", "bias": "GemmAndBiasTunableOp"})


@dataclass(frozen=True, slots=True)
class TorchCsv:
    """The lines of a file for torch, and the GEMMs that the format cannot express."""

    lines: tuple[str, ...]
    omitted_gemms: tuple[tuple[Gemm, str], ...]  # GEMMs that are not in the file, with the reason.

    @property
    def text(self) -> str:
        """The content of the file."""
        return "".join(f"{line}\n" for line in self.lines)


def torch_csv(tuned: Tuned, validators: Mapping[str, str]) -> TorchCsv:
    """Return a file for torch with the GEMMs whose tuned algorithm is faster than the default."""
    lines = [f"Validator,{name},{value}" for name, value in validators.items()]
    omitted_gemms: list[tuple[Gemm, str]] = []
    for tuned_gemm in tuned.gemms:
        if not tuned_gemm.significant:
            continue
        reason = next(_unsupported_properties(tuned_gemm), "")
        if reason:
            omitted_gemms.append((tuned_gemm.gemm, reason))
        else:
            lines.append(_result_line(tuned_gemm))
    return TorchCsv(tuple(lines), tuple(omitted_gemms))


def check_validators(validators: Mapping[str, str], machine: TunedMachine) -> None:
    """Raise InputError if torch would reject the file, or uses another version of the library.

    The parameters of an algorithm are only valid within one version of the library.
    """
    for name in (_TORCH_VALIDATOR, _LIBRARY_VALIDATOR):
        if name not in validators:
            raise InputError(
                f"the validators of torch lack {name}, which torch 2.15 and newer for CUDA write",
                hint="use a file of torch 2.15 or newer",
            )
    torch_version, tuned_version = (
        _version(validators[_LIBRARY_VALIDATOR]),
        _version(machine.library_version),
    )
    if torch_version is not None and tuned_version is not None and torch_version != tuned_version:
        raise InputError(
            f"torch uses cuBLASLt {validators[_LIBRARY_VALIDATOR]}, but {machine.library_version} was tuned",
            hint="tune with the nvidia-cublas that torch was installed with",
        )


def read_validators(path: Path) -> Mapping[str, str]:
    """Return the validators of a file of torch.cuda.tunable. Raises InputError if it has none."""
    lines = read_text(path, _VALIDATORS_FILE).splitlines()
    rows = [line.split(",", 2) for line in lines if line.startswith("Validator,")]
    validators = {row[1]: row[2].strip() for row in rows if len(row) == 3}
    if not validators:
        raise InputError(
            f"{path} has no line that starts with 'Validator,'", hint=_VALIDATORS_FILE.hint
        )
    return validators


def _result_line(tuned_gemm: TunedGemm) -> str:
    seconds = tuned_gemm.winner_s
    times = [] if isinstance(seconds, Unavailable) else [f"{seconds * 1e3:.6g}"]
    gemm = tuned_gemm.gemm
    return ",".join(
        (_operator_name(gemm), _parameters(gemm), algorithm_name(tuned_gemm.winner), *times)
    )


def _operator_name(gemm: Gemm) -> str:
    name = "GemmStridedBatchedTunableOp" if gemm.batch > 1 else _OPERATOR_BY_EPILOGUE[gemm.epilogue]
    return f"{name}_{_TYPE_NAMES[gemm.dtype]}_{gemm.layout.upper()}"


def _parameters(gemm: Gemm) -> str:
    sizes = f"{gemm.layout}_{gemm.m}_{gemm.n}_{gemm.k}"
    batch = f"_B_{gemm.batch}" if gemm.batch > 1 else ""
    return f"{sizes}{batch}_ld_{gemm.a.leading}_{gemm.b.leading}_{gemm.d.leading}"


def algorithm_name(algorithm: Algorithm) -> str:
    """Return the name of an algorithm in torch."""
    parameter_numbers: Sequence[tuple[str, int]] = (
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
    return "_".join(["Gemm_Cublaslt", *(f"{name}_{number}" for name, number in parameter_numbers)])


def _unsupported_properties(tuned_gemm: TunedGemm) -> Iterator[str]:
    """Yield the properties of a GEMM that torch cannot express."""
    gemm = tuned_gemm.gemm
    data_type = DATA_TYPES[gemm.dtype]
    if gemm.dtype not in _TYPE_NAMES:
        yield f"torch's names of GEMMs in {gemm.dtype} contain their scales"
    if gemm.epilogue not in _OPERATOR_BY_EPILOGUE:
        yield f"torch's names of GEMMs do not contain the epilogue {gemm.epilogue}"
    if gemm.batch > 1 and gemm.epilogue != "none":
        yield "torch has no batched GEMM with a bias"
    if gemm.padding:
        yield "the GEMM has padding"
    if gemm.output != data_type.outputs[0].name:
        yield f"the output type is {gemm.output}"
    if gemm.accumulate != data_type.accumulators[0]:
        yield f"the accumulation type is {gemm.accumulate}"


def _version(text: str) -> tuple[int, ...] | None:
    """Parse a version such as 13.1.0, or 130100 as cublasLtGetVersion returns; None for other text."""
    if text.isdecimal() and int(text) >= 10_000:
        encoded_version = int(text)
        return encoded_version // 10_000, encoded_version // 100 % 100, encoded_version % 100
    version_numbers = text.split(".")[:3]
    return (
        tuple(map(int, version_numbers))
        if len(version_numbers) == 3 and all(map(str.isdecimal, version_numbers))
        else None
    )
