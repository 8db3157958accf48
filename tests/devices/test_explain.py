from __future__ import annotations

import pytest

from cudakit.devices.doctor.checks import checks_by_id
from cudakit.devices.doctor.system import CATALOG_URL, known_xids
from cudakit.devices.explain import Topic, explain, report
from cudakit.errors import UsageError
from cudakit.report.document import Facts, Section, Text

ERRORS = tuple(
    Topic(
        kind="CUDA error",
        name=name,
        code=code,
        other_names=(runtime,),
        meaning="what happened",
        causes="causes",
        action="action",
        source="source",
    )
    for name, code, runtime in (
        ("CUDA_ERROR_ILLEGAL_ADDRESS", 700, "cudaErrorIllegalAddress"),
        ("CUDA_ERROR_DEVICE_UNAVAILABLE", 46, "cudaErrorDevicesUnavailable"),
        ("CUDA_ERROR_OUT_OF_MEMORY", 2, "cudaErrorMemoryAllocation"),
    )
)


def explained(*words: str) -> list[tuple[str, str]]:
    return [(topic.kind, topic.name) for topic in explain(words, ERRORS).topics]


@pytest.mark.parametrize(
    "term",
    [
        "700",
        " 700 ",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "illegal_address",
        "cudaErrorIllegalAddress",
        "IllegalAddress",
        "CUDA error 700",
    ],
)
def test_cuda_error_is_found_by_code_and_names(term: str) -> None:
    assert explained(term) == [("CUDA error", "CUDA_ERROR_ILLEGAL_ADDRESS")]


@pytest.mark.parametrize("term", ["Xid 79", "xid79", "XID: 79", "79"])
def test_xid_is_found_by_number(term: str) -> None:
    assert explained(term) == [("Xid", "Xid 79")]


def test_number_of_error_and_xid_has_both_meanings() -> None:
    assert explained("46") == [("CUDA error", "CUDA_ERROR_DEVICE_UNAVAILABLE"), ("Xid", "Xid 46")]


@pytest.mark.parametrize("term", ["CK012", "ck12"])
def test_check_is_found_by_id(term: str) -> None:
    (topic,) = explain([term], ERRORS).topics

    assert (topic.kind, topic.name) == ("check", "CK012")
    assert topic.explanation == checks_by_id()["CK012"].explanation


@pytest.mark.parametrize(
    ("term", "kind"),
    [
        ("CUBLAS_STATUS_ALLOC_FAILED", "cuBLAS status"),
        ("ncclSystemError", "NCCL status"),
        ("NCCL_P2P_DISABLE", "environment variable of NCCL"),
        ("NVIDIA_VISIBLE_DEVICES", "environment variable of NVIDIA's containers"),
    ],
)
def test_statuses_and_variables_are_found_by_name(term: str, kind: str) -> None:
    assert explained(term) == [(kind, term)]


@pytest.mark.parametrize(
    ("term", "hint"),
    [
        ("CUDA_ERROR_ILEGAL_ADDRESS", "did you mean CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("CUBLAS_STATUS_ALLOC_FAILD", "did you mean CUBLAS_STATUS_ALLOC_FAILED"),
        ("CK999", "checks are CK001 to CK038, CK041 to CK044"),
        ("12345", "Xid 79"),
        ("nonsense", "Xid 79"),
        ("NCCL_P2P", "did you mean NCCL_P2P_DISABLE, NCCL_P2P_LEVEL"),
        ("illegal memory access", "did you mean Xid 137?"),
        ("OOM", "did you mean CUDA_ERROR_OUT_OF_MEMORY?"),
        ("CUDA_ERROR_OOM", "did you mean CUDA_ERROR_OUT_OF_MEMORY?"),
        ("5000", "did you mean CUDNN_STATUS_EXECUTION_FAILED?"),
    ],
)
def test_unknown_term_is_refused_with_suggestion(term: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        explain([term], ERRORS)

    assert refused.value.message == f"no explanation for {term!r}"
    assert hint in refused.value.hint


def test_several_terms_are_explained_in_their_order() -> None:
    assert explained("Xid", "79", "700", "CK001", "700") == [
        ("Xid", "Xid 79"),
        ("CUDA error", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("check", "CK001"),
    ]


def test_unknown_xid_refers_to_the_catalog() -> None:
    with pytest.raises(UsageError, match="no explanation for 'Xid 999'") as refused:
        explained("Xid", "999")
    assert refused.value.hint == f"NVIDIA's catalog may have it: {CATALOG_URL}"


def test_unknown_term_among_others_is_named() -> None:
    with pytest.raises(UsageError, match="no explanation for 'CK999'"):
        explained("700", "CK999")


def test_words_without_a_known_term_are_one_message() -> None:
    with pytest.raises(UsageError, match="no explanation for 'out of memory'") as refused:
        explained("out", "of", "memory")

    assert refused.value.hint == "did you mean CUDA_ERROR_OUT_OF_MEMORY?"


@pytest.mark.parametrize("number", known_xids())
def test_every_xid_has_meaning_and_action(number: int) -> None:
    (*_, topic) = explain([f"Xid {number}"], ERRORS).topics

    assert topic.meaning
    assert topic.action


# --- the report ------------------------------------------------------------------------------------


def test_report_has_meaning_causes_and_action() -> None:
    document = report(explain(["700"], ERRORS))

    assert document.title == "CUDA_ERROR_ILLEGAL_ADDRESS (CUDA error 700)"
    (facts,) = document.nodes
    assert isinstance(facts, Facts)
    assert dict(facts.rows) == {
        "what happened": Text("what happened"),
        "usual causes": Text("causes"),
        "what to do": Text("action"),
        "also known as": Text("cudaErrorIllegalAddress"),
        "source": Text("source"),
    }


def test_report_of_check_labels_its_paragraphs() -> None:
    document = report(explain(["CK001"], ERRORS))

    assert document.title == "CK001 checks that the NVIDIA driver is loaded"
    (facts,) = document.nodes
    assert isinstance(facts, Facts)
    assert [label for label, _ in facts.rows] == ["purpose", "background", "what to do"]
    texts = {label: value.value for label, value in facts.rows if isinstance(value, Text)}
    assert not texts["purpose"].endswith(".")
    assert texts["background"].endswith(".")


def test_single_sentences_of_all_checks_have_no_full_stop() -> None:
    for name in checks_by_id():
        (facts,) = report(explain([name], ERRORS)).nodes
        assert isinstance(facts, Facts)
        texts = [value.value for _, value in facts.rows if isinstance(value, Text)]
        assert all(". " in text for text in texts if text.endswith("."))


def test_report_of_several_meanings_has_a_section_for_each() -> None:
    document = report(explain(["46"], ERRORS))

    assert document.title == "46: 2 explanations"
    assert all(isinstance(node, Section) for node in document.nodes)
