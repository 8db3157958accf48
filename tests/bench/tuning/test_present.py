from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from bench.tuning.tunings import DEFAULT, FASTER, GEMM, tuned, tuned_gemm, untuned_gemm

from cudakit.bench.case import Verification
from cudakit.bench.tuning.present import describe_gemm, present_tuned
from cudakit.bench.tuning.torch_csv import TorchCsv
from cudakit.bench.tuning.tuned import Tuned, UntunedGemm
from cudakit.gpu.api.gemm import Gemm
from cudakit.report import console
from cudakit.report.document import Document, Note, Table

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
