from __future__ import annotations

from core.devices.diagnose.machines import Machine, broken_cuda, gpu, seen

from cudakit.core.devices.diagnose import diagnose, explain, present
from cudakit.document import Document, Facts, Note, Section, Text
from cudakit.units import Unavailable


def section(document: Document, title: str) -> Section:
    found = [node for node in document.nodes if isinstance(node, Section)]
    return next(node for node in found if node.title.startswith(title))


def notes(section: Section) -> list[Note]:
    return [node for node in section.nodes if isinstance(node, Note)]


def test_passed_check_takes_one_line(machine: Machine) -> None:
    document = present.report(diagnose(machine()))

    assert section(document, "System").title == "System: ok"
    assert all(isinstance(node, Note) for node in section(document, "System").nodes)
    assert document.title == "no check found anything wrong"


def test_finding_has_evidence_and_fix(machine: Machine) -> None:
    limited = machine(**seen(gpu(0, power_limit_enforced_w=450.0)))

    found = section(present.report(diagnose(limited)), "Health")

    assert found.title == "Health: 1 warning"
    first, evidence = found.nodes[4:6]
    assert isinstance(first, Note)
    assert (first.level, first.remedies) == ("warn", ("sudo nvidia-smi -i 0 -pl 700",))
    assert evidence == Facts((("GPU 0", Text("450 W of 700 W")),))


def test_evidence_in_summary_is_not_repeated(machine: Machine) -> None:
    blocking = diagnose(machine(variables={"CUDA_LAUNCH_BLOCKING": "1"}))

    assert len(section(present.report(blocking), "Settings").nodes) == 5
    told = next(check for check in blocking.checks if check.id == "CK020")
    assert told.evidence == {"CUDA_LAUNCH_BLOCKING": "1"}


def test_unknown_checks_with_same_reason_share_one_line(machine: Machine) -> None:
    silent = machine(nvml=Unavailable("silent"))

    said = notes(section(present.report(diagnose(silent)), "Health"))[-1]

    assert said.level == "info"
    assert said.text == (
        "CK027, CK028, CK029, CK030, CK031, CK032 not judged: NVML does not answer (CK003)"
    )


def test_section_title_counts_failures(machine: Machine) -> None:
    document = present.report(diagnose(machine(cuda=broken_cuda(999))))

    assert section(document, "Driver").title == "Driver: 1 failed"
    assert document.title == "1 check failed"


def test_summary_counts_and_names_worst_check(machine: Machine) -> None:
    last = present.report(diagnose(machine(cuda=broken_cuda(999)))).nodes[-1]

    assert isinstance(last, Note)
    assert last.level == "error"
    assert last.text.startswith("36 checks: 1 failed, 0 warnings")
    assert last.remedies == ("cudakit doctor --explain CK005 says more of a check",)


def test_title_marks_simulated_machine(machine: Machine) -> None:
    assert present.report(diagnose(machine(simulated=True))).title.startswith("Simulated: ")


def test_pasted_report_has_versions_devices_and_evidence(machine: Machine) -> None:
    wrong = machine(**seen(gpu(0, persistence_mode=False)))

    document = present.paste(diagnose(wrong))

    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == ["Versions", "GPUs", "Not well", "Well"]
    assert any(isinstance(node, Facts) for node in section(document, "Well").nodes)


def test_pasted_report_has_no_empty_sections(machine: Machine) -> None:
    bare = machine(nvml=Unavailable("silent"), cuda=Unavailable("silent"))

    document = present.paste(diagnose(bare, only=("CK020",)))

    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == ["Versions", "Well"]


def test_explanation_has_one_note_per_paragraph() -> None:
    document = present.explanation(explain("CK001"))

    assert document.title == "CK001: the NVIDIA driver is loaded"
    assert len(document.nodes) > 1
