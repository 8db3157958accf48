from __future__ import annotations

from pathlib import Path

import pytest
from bench.tuning.tunings import MACHINE, tuned, tuned_gemm, untuned_gemm

from cudakit.bench.tuning.torch_csv import check_validators, read_validators, torch_csv
from cudakit.errors import InputError
from cudakit.gpu.api.gemm import Gemm
from cudakit.units import Unavailable

VALIDATORS = {"PT_VERSION": "2.15.0", "CUBLASLT_VERSION": "130100"}
ALGORITHM_NAME = (
    "Gemm_Cublaslt_id_66_tile_24_stages_36_splitk_2_red_2_swizzle_1_custom_3_inner_4_cluster_5"
)


def exported_lines(gemm: Gemm) -> list[str]:
    return list(torch_csv(tuned(tuned_gemm(gemm=gemm)), {}).lines)


@pytest.mark.parametrize(
    ("gemm", "begin"),
    [
        (
            Gemm(dtype="bf16", m=8192, n=4096, k=1024),
            "GemmTunableOp_BFloat16_TN,tn_8192_4096_1024_ld_1024_1024_8192",
        ),
        (
            Gemm(dtype="fp16", m=8, n=4, k=2, layout="nt"),
            "GemmTunableOp_Half_NT,nt_8_4_2_ld_8_4_8",
        ),
        (
            Gemm(dtype="fp32", m=8, n=4, k=2, layout="nn"),
            "GemmTunableOp_float_NN,nn_8_4_2_ld_8_2_8",
        ),
        (Gemm(dtype="tf32", m=8, n=4, k=2, layout="tt"), "GemmTunableOp_tf32_TT,tt_8_4_2_ld_2_4_8"),
        (
            Gemm(dtype="fp64", m=8, n=4, k=2, epilogue="bias"),
            "GemmAndBiasTunableOp_double_TN,tn_8_4_2_ld_2_2_8",
        ),
        (
            Gemm(dtype="bf16", m=8, n=4, k=2, batch=6),
            "GemmStridedBatchedTunableOp_BFloat16_TN,tn_8_4_2_B_6_ld_2_2_8",
        ),
    ],
)
def test_exported_gemm_has_name_that_torch_uses(gemm: Gemm, begin: str) -> None:
    assert exported_lines(gemm) == [f"{begin},{ALGORITHM_NAME},0.095"]


@pytest.mark.parametrize(
    ("gemm", "words"),
    [
        (Gemm(dtype="int8", m=8, n=4, k=2), "int8"),
        (Gemm(dtype="fp8_e4m3", m=16, n=16, k=16), "scales"),
        (Gemm(dtype="bf16", m=8, n=4, k=2, padding=1), "padding"),
        (Gemm(dtype="bf16", m=8, n=4, k=2, epilogue="relu-bias"), "relu-bias"),
        (Gemm(dtype="bf16", m=8, n=4, k=2, epilogue="bias", batch=2), "batched GEMM with a bias"),
        (Gemm(dtype="bf16", m=8, n=4, k=2, output="fp32"), "output type is fp32"),
        (Gemm(dtype="fp16", m=8, n=4, k=2, accumulate="fp16"), "accumulation type is fp16"),
    ],
)
def test_gemm_without_name_in_torch_is_omitted_with_reason(gemm: Gemm, words: str) -> None:
    exported = torch_csv(tuned(tuned_gemm(gemm=gemm)), VALIDATORS)

    ((left_out, reason),) = exported.omitted_gemms
    assert left_out == gemm
    assert words in reason
    assert len(exported.lines) == len(VALIDATORS)


def test_file_has_validators_and_faster_algorithms_only() -> None:
    exported = torch_csv(tuned(untuned_gemm(), tuned_gemm()), VALIDATORS)

    assert exported.text.splitlines()[:2] == [
        "Validator,PT_VERSION,2.15.0",
        "Validator,CUBLASLT_VERSION,130100",
    ]
    assert len(exported.lines) == 3
    assert exported.omitted_gemms == ()


def test_unknown_time_is_omitted_from_line() -> None:
    without_time = tuned_gemm(winner_s=Unavailable("no sample"))

    assert torch_csv(tuned(without_time), {}).lines[0].endswith(ALGORITHM_NAME)


@pytest.mark.parametrize("version", ["130100", "13.1.0", "13.1.0.20", "something"])
def test_validators_of_same_library_version_are_accepted(version: str) -> None:
    check_validators({**VALIDATORS, "CUBLASLT_VERSION": version}, MACHINE)


@pytest.mark.parametrize(
    ("validators", "message"),
    [
        ({**VALIDATORS, "CUBLASLT_VERSION": "120803"}, "torch uses cuBLASLt 120803"),
        ({**VALIDATORS, "CUBLASLT_VERSION": "13.2.0"}, "but 13.1.0 was tuned"),
        ({"PT_VERSION": "2.13.0"}, "CUBLASLT_VERSION"),
        ({"CUBLASLT_VERSION": "130100"}, "PT_VERSION"),
    ],
)
def test_validators_of_other_library_version_are_rejected(
    validators: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_validators(validators, MACHINE)


def test_validators_are_read_from_file_that_torch_wrote(tmp_path: Path) -> None:
    path = tmp_path / "tunableop_results0.csv"
    path.write_text(torch_csv(tuned(tuned_gemm()), VALIDATORS).text)

    assert read_validators(path) == VALIDATORS


def test_file_without_validators_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b,c\nValidator,short\n")

    with pytest.raises(InputError, match="no line that starts with 'Validator,'"):
        read_validators(path)
    with pytest.raises(InputError, match="does not exist"):
        read_validators(tmp_path / "none.csv")
