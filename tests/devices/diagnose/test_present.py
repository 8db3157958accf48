from __future__ import annotations

from pathlib import Path

from devices.diagnose.machines import Machine, both_views, failed_cuda, gpu, on_bus

from cudakit.devices.diagnose import diagnose, present
from cudakit.gpu.api.run_context import Library
from cudakit.report.document import Document, Facts, Note, Section, Table, Text
from cudakit.units import Unavailable


def section(document: Document, title: str) -> Section:
    sections = [node for node in document.nodes if isinstance(node, Section)]
    return next(node for node in sections if node.title.startswith(title))


def notes(owner: Section | Document) -> list[Note]:
    return [node for node in owner.nodes if isinstance(node, Note)]


# --- problems only ---------------------------------------------------------------------------------


def test_report_without_problems_is_one_line_of_counts(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    document = present.report(diagnose(machine()))

    assert document.title == "No problems found"
    assert [note.text for note in notes(document)] == ["38 checks: 0 failed, 0 warnings, 38 passed"]
    assert notes(document)[0].remedies == ("cudakit doctor --all lists every check",)


def test_report_has_failures_before_warnings(machine: Machine) -> None:
    wrong = machine(
        variables={"CUDA_LAUNCH_BLOCKING": "1"}, shared_memory_bytes=1, cuda=failed_cuda(999)
    )

    document = present.report(diagnose(wrong))

    assert [note.text[:5] for note in notes(document)[:3]] == ["CK005", "CK020", "CK034"]
    assert document.title == "1 check failed, 2 warnings"


def test_finding_has_evidence_and_fix(machine: Machine) -> None:
    limited = machine(**both_views(gpu(0, power_limit_enforced_w=450.0)))

    first, evidence = present.report(diagnose(limited)).nodes[:2]

    assert isinstance(first, Note)
    assert (first.level, first.remedies) == ("warn", ("sudo nvidia-smi -i 0 -pl 700",))
    assert evidence == Facts((("GPU 0", Text("450 W, default 700 W")),))


def test_evidence_in_summary_is_not_repeated(machine: Machine) -> None:
    blocking = diagnose(machine(variables={"CUDA_LAUNCH_BLOCKING": "1"}))

    assert not [node for node in present.report(blocking).nodes if isinstance(node, Facts)]
    sections = next(check for check in blocking.checks if check.id == "CK020")
    assert sections.evidence == {"CUDA_LAUNCH_BLOCKING": "1"}


def test_summary_counts_and_names_worst_check(machine: Machine) -> None:
    wrong = machine(variables={"CUDA_LAUNCH_BLOCKING": "1"}, cuda=failed_cuda(999))

    last = notes(present.report(diagnose(wrong)))[-1]

    assert last.level == "error"
    assert last.text.startswith("38 checks: 1 failed, 1 warning, ")
    assert last.remedies[0] == "cudakit explain CK005 CK020 explains these checks"


def test_summary_counts_checks_that_could_not_be_made(machine: Machine) -> None:
    result = diagnose(machine(nvml=Unavailable("silent")), only_checks=("CK020", "CK027", "CK028"))

    assert notes(present.report(result))[-1].text == (
        "3 checks: 0 failed, 0 warnings, 1 passed, 2 not performed"
    )
    assert result.status.name == "OK"


def test_title_of_report_without_any_answer_claims_nothing(machine: Machine) -> None:
    result = diagnose(machine(nvml=Unavailable("silent")), only_checks=("CK027",))

    assert present.report(result).title == "No check could be performed"


def test_set_variables_are_named_in_one_line(machine: Machine) -> None:
    result = diagnose(machine(variables={"NCCL_DEBUG": "WARN", "CUDA_CACHE_PATH": "/cache"}))

    assert notes(present.report(result))[0].text == (
        "2 environment variables for CUDA programs are set: CUDA_CACHE_PATH, NCCL_DEBUG"
    )


def test_title_marks_simulated_machine(machine: Machine) -> None:
    assert present.report(diagnose(machine(simulated=True))).title.startswith("Simulated: ")


# --- all checks ------------------------------------------------------------------------------------


def test_passed_check_takes_one_line(machine: Machine) -> None:
    document = present.report(diagnose(machine()), show_all=True)

    assert len(notes(section(document, "System"))) == 5
    assert all(isinstance(node, Note) for node in section(document, "System").nodes)


def test_unknown_checks_with_same_reason_share_one_line(machine: Machine) -> None:
    silent = machine(nvml=Unavailable("silent"))

    last = notes(section(present.report(diagnose(silent), show_all=True), "GPU health"))[-1]

    assert last.level == "info"
    assert last.text == (
        "CK027, CK028, CK029, CK030, CK031, CK032 not performed: NVML does not answer (CK003)"
    )


def test_set_variables_are_listed_with_effect(machine: Machine) -> None:
    result = diagnose(machine(variables={"NCCL_DEBUG": "WARN"}))

    (table,) = section(present.report(result, show_all=True), "Environment variables that").nodes
    assert isinstance(table, Table)
    assert table.caption.startswith("Only variables that cudakit knows are listed. ")
    assert [cell.value for cell in table.rows[0] if isinstance(cell, Text)] == [
        "NCCL_DEBUG",
        "WARN",
        "log level: VERSION, WARN, INFO or TRACE",
        "NCCL",
    ]


def test_sources_of_libraries_have_plain_labels_in_text_only(machine: Machine) -> None:
    library = Library("libcudnn.so.9", "/cudnn", "/cudnn", "package")

    result = diagnose(machine(libraries=(library,)), only_checks=("CK012",))

    (evidence,) = (
        node
        for node in section(present.paste_report(result), "Passed").nodes
        if isinstance(node, Facts)
    )
    assert evidence == Facts((("in Python packages", Text("libcudnn.so.9")),))
    assert result.checks[0].evidence == {"package": "libcudnn.so.9"}


# --- the report to paste ---------------------------------------------------------------------------


def test_pasted_report_has_versions_devices_and_evidence(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    wrong = machine(**both_views(gpu(0, persistence_mode=False)))

    document = present.paste_report(diagnose(wrong))

    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == ["Versions", "GPUs", "Problems", "Passed", "Summary"]
    assert any(isinstance(node, Facts) for node in section(document, "Passed").nodes)


def test_pasted_report_has_no_empty_sections(machine: Machine) -> None:
    bare = machine(nvml=Unavailable("silent"), cuda=Unavailable("silent"))

    document = present.paste_report(diagnose(bare, only_checks=("CK020",)))

    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == ["Versions", "Passed", "Summary"]
