""""""

from __future__ import annotations

import json as standard_json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.tuning.tunings import DEFAULT, FASTER, GEMM, MACHINE, tuned, tuned_gemm, untuned_gemm

from cudakit.bench.case import Verification
from cudakit.bench.tuning.tuned import (
    TorchCsv,
    Tuned,
    UntunedGemm,
    check_validators,
    describe_gemm,
    load_tuned,
    present_tuned,
    read_validators,
    torch_csv,
)
from cudakit.errors import InputError
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.report import console, json
from cudakit.report.document import Document, Note, Table
from cudakit.units import Unavailable

OTHER = Gemm(dtype="bf16", m=64, n=64, k=64)


def test_only_algorithms_faster_than_default_are_used() -> None:
    tuning = tuned(tuned_gemm(), untuned_gemm(gemm=OTHER))

    assert tuning.algorithms_for(MACHINE) == {GEMM: FASTER}


@pytest.mark.parametrize(
    ("other_machine", "message"),
    [
        (replace(MACHINE, gpu="NVIDIA H100"), "GPU: tuned NVIDIA H200, here NVIDIA H100"),
        (replace(MACHINE, compute_capability="10.0"), "tuned 9.0, here 10.0"),
        (replace(MACHINE, library_version="13.2.0"), "cublaslt version: tuned 13.1.0, here 13.2.0"),
        (replace(MACHINE, gpu=Unavailable("it does not say")), "here unknown"),
    ],
)
def test_tuned_algorithms_of_other_machine_are_rejected(
    other_machine: object, message: str
) -> None:
    with pytest.raises(InputError, match="tuned on another machine") as caught:
        tuned(tuned_gemm()).algorithms_for(other_machine)  # type: ignore[arg-type]

    assert message in caught.value.message
    assert "--tune" in caught.value.hint


def test_other_driver_or_cudakit_version_is_accepted() -> None:
    newer = replace(MACHINE, driver="590.1", cudakit="0.2.0")

    assert tuned(tuned_gemm()).algorithms_for(newer) == {GEMM: FASTER}


def test_algorithm_is_not_used_with_other_settings() -> None:
    deterministic = GemmSettings(deterministic=True)

    assert tuned(tuned_gemm()).algorithms_for(MACHINE, deterministic) == {}
    assert tuned(tuned_gemm()).algorithms_for(MACHINE, GemmSettings()) == {GEMM: FASTER}


TUNED = tuned(
    tuned_gemm(), untuned_gemm(shape="llama3-8b qkv"), untuned=(UntunedGemm(GEMM, "why", True),)
)


def write_tuning(path: Path, tuning: Tuned = TUNED) -> Path:
    path.write_text(json.render(tuning), encoding="utf-8")
    return path


def test_written_tuning_is_read_back(tmp_path: Path) -> None:
    assert load_tuned(write_tuning(tmp_path / "tuned.json")) == TUNED


def set_value(*keys: str | int, value: object) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_value("products", 1, "gemm", "m", value=0), r"products\[1\]: m is 0"),
        (
            set_value("products", 0, "gemm", "dtype", value="fp7"),
            r"products\[0\]: unknown data type 'fp7'",
        ),
        (
            set_value("products", 0, "winner", "id", value="x"),
            r"products\[0\].winner.id should be a whole",
        ),
        (
            set_value("products", 0, "limits", "time_s", value=-1.0),
            r"products\[0\]: the tuning time",
        ),
        (set_value("products", value={}), "products should be a list"),
        (set_value("untuned", 0, "gemm", "k", value=-1), r"untuned\[0\]: k is -1"),
        (set_value("machine", "library", value="torch7"), "machine.library should be"),
        (set_value("machine", value=[]), "machine should be an object"),
        (
            set_value("schema", value="cudakit.bench/1"),
            "is a result of cudakit bench, not a result of cudakit bench gemm --tune",
        ),
        (set_value("schema", value="cudakit.tuned/2"), "cudakit.tuned/2"),
    ],
)
def test_damaged_file_error_names_position(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    path = write_tuning(tmp_path / "tuned.json")
    values = standard_json.loads(path.read_text())
    change(values)
    path.write_text(standard_json.dumps(values))

    with pytest.raises(InputError, match=message):
        load_tuned(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "it is not text"),
        (b"[]", "is not a result of cudakit bench gemm --tune"),
        (b"[" * 9999, "JSON"),
    ],
)
def test_file_of_other_kind_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(content)

    with pytest.raises(InputError, match=message):
        load_tuned(path)


def test_missing_file_error_names_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_tuned(tmp_path / "tuned.json")


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


SMALL = Gemm(dtype="fp16", m=64, n=64, k=64, layout="nn", epilogue="bias")
Golden = Callable[[str, str], None]


def notes(document: Document, level: str) -> list[str]:
    return [node.text for node in document.nodes if isinstance(node, Note) and node.level == level]


def table(document: Document) -> Table:
    return next(node for node in document.nodes if isinstance(node, Table))


def test_tuning_report_on_terminal(golden: Golden) -> None:
    tuning = tuned(tuned_gemm(), untuned_gemm(gemm=SMALL, shape="llama3-8b qkv"))

    text = console.render(present_tuned(tuning, files=["tuned.json"]), width=140, color=False)
    golden("bench-tune.txt", text)


def test_gemm_description_omits_defaults() -> None:
    assert describe_gemm(GEMM) == "bf16 8192×4096×1024 tn"
    assert describe_gemm(SMALL) == "fp16 64×64×64 nn, epilogue bias"


def test_gemms_that_keep_default_are_faint() -> None:
    assert table(present_tuned(tuned(tuned_gemm(), untuned_gemm()))).faint_rows == {1}


def test_tuning_without_gain_is_reported() -> None:
    document = present_tuned(tuned(untuned_gemm()))

    assert notes(document, "ok") == [
        "No significant gain for 1 GEMM: the default algorithm is used."
    ]


def test_interrupted_gemms_do_not_count_as_gemms_without_gain() -> None:
    interrupted_gemm = untuned_gemm(stopped="interrupted")
    document = present_tuned(tuned(untuned_gemm(), interrupted_gemm, complete=False))

    assert notes(document, "ok") == [
        "No significant gain for 1 GEMM: the default algorithm is used."
    ]
    assert not notes(present_tuned(tuned(interrupted_gemm, complete=False)), "ok")


def test_results_of_an_earlier_tuning_are_named() -> None:
    earlier_result = untuned_gemm(gemm=SMALL)
    document = present_tuned(
        tuned(earlier_result, tuned_gemm()), earlier_tuning=tuned(earlier_result)
    )

    assert notes(document, "info")[0] == (
        "Searched earlier, results from the file of --tuned: fp16 64×64×64 nn, epilogue bias."
    )


def test_unsaved_tuning_suggests_file_first() -> None:
    (note,) = (
        node
        for node in present_tuned(tuned(tuned_gemm())).nodes
        if isinstance(node, Note) and node.level == "ok"
    )

    assert "-o tuned.json" in note.remedies[0]


def tunings_with_notes() -> Iterator[tuple[Tuned, str, str]]:
    yield tuned(tuned_gemm(), complete=False), "warn", "Interrupted"
    yield tuned(tuned_gemm(stopped="time")), "warn", "time limit ended"
    yield tuned(tuned_gemm(wrong=(DEFAULT,))), "warn", "computes wrong values and was excluded"
    yield tuned(tuned_gemm(), warnings=("gaps count",)), "warn", "Gaps count."
    yield tuned(tuned_gemm(), simulated=True), "info", "Simulated"
    yield (
        tuned(untuned=(UntunedGemm(GEMM, "no such type", False),)),
        "warn",
        "not tuned: no such type",
    )
    yield tuned(untuned=(UntunedGemm(GEMM, "it is wrong", True),)), "error", "it is wrong"
    wrong = Verification(False, 1.0, 0.1, "fp64", "3 values were never written")
    yield tuned(untuned_gemm(verification=wrong)), "error", "3 values were never written"


@pytest.mark.parametrize(("tuning", "level", "message"), list(tunings_with_notes()))
def test_warnings_of_tuning_are_shown(tuning: Tuned, level: str, message: str) -> None:
    assert any(message in text for text in notes(present_tuned(tuning), level))


def test_torch_export_is_experimental_and_names_omissions() -> None:
    exported = TorchCsv((), ((SMALL, "it has padding"),))
    document = present_tuned(tuned(tuned_gemm()), torch_csv=exported)

    assert any("experimental" in text for text in notes(document, "info"))
    assert any("it has padding" in text for text in notes(document, "warn"))
    assert FASTER.id == 66
