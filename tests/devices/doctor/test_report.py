""""""

from __future__ import annotations

import json
import string
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from devices.doctor.machines import Machine, both_views, failed_cuda, gpu, on_bus
from hypothesis import given
from hypothesis import strategies as st

from cudakit.devices.doctor.check import CheckResult, DeviceLine, DoctorResult, Status
from cudakit.devices.doctor.checks import THEMES, checks_by_id, diagnose
from cudakit.devices.doctor.report import (
    _COMMON_NAMES,
    Identity,
    paste_report,
    redact_value,
    report,
)
from cudakit.gpu.api.facts import Library
from cudakit.report import console
from cudakit.report.document import Document, Facts, Note, Section, Table, Text
from cudakit.report.json import render
from cudakit.units import Unavailable

COUNT = sum(map(len, THEMES.values()))


def section(document: Document, title: str) -> Section:
    sections = [node for node in document.nodes if isinstance(node, Section)]
    return next(node for node in sections if node.title.startswith(title))


def notes(owner: Section | Document) -> list[Note]:
    return [node for node in owner.nodes if isinstance(node, Note)]


# --- problems only ---------------------------------------------------------------------------------


def test_report_without_problems_is_one_line_of_counts(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    document = report(diagnose(machine()))

    assert document.title == "No problems found"
    assert [note.text for note in notes(document)] == [
        f"{COUNT} checks: 0 failed, 0 warnings, {COUNT} passed"
    ]
    assert notes(document)[0].remedies == ("cudakit doctor --all lists every check",)


def test_report_has_failures_before_warnings(machine: Machine) -> None:
    wrong = machine(
        variables={"CUDA_LAUNCH_BLOCKING": "1"}, shared_memory_bytes=1, cuda=failed_cuda(999)
    )

    document = report(diagnose(wrong))

    assert [note.text[:5] for note in notes(document)[:3]] == ["CK005", "CK020", "CK034"]
    assert document.title == "1 check failed, 2 warnings"


def test_finding_has_evidence_and_fix(machine: Machine) -> None:
    limited = machine(**both_views(gpu(0, power_limit_enforced_w=450.0)))

    first, evidence = report(diagnose(limited)).nodes[:2]

    assert isinstance(first, Note)
    assert (first.level, first.remedies) == ("warn", ("sudo nvidia-smi -i 0 -pl 700",))
    assert evidence == Facts((("GPU 0", Text("450 W, default 700 W")),))


def test_evidence_in_summary_is_not_repeated(machine: Machine) -> None:
    blocking = diagnose(machine(variables={"CUDA_LAUNCH_BLOCKING": "1"}))

    assert not [node for node in report(blocking).nodes if isinstance(node, Facts)]
    sections = next(check for check in blocking.checks if check.id == "CK020")
    assert sections.evidence == {"CUDA_LAUNCH_BLOCKING": "1"}


def test_summary_counts_and_names_worst_check(machine: Machine) -> None:
    wrong = machine(variables={"CUDA_LAUNCH_BLOCKING": "1"}, cuda=failed_cuda(999))

    last = notes(report(diagnose(wrong)))[-1]

    assert last.level == "error"
    assert last.text.startswith(f"{COUNT} checks: 1 failed, 1 warning, ")
    assert last.remedies[0] == "cudakit explain CK005 CK020 explains these checks"


def test_summary_counts_checks_that_could_not_be_made(machine: Machine) -> None:
    result = diagnose(machine(nvml=Unavailable("silent")), only_checks=("CK020", "CK027", "CK028"))

    assert notes(report(result))[-1].text == (
        "3 checks: 0 failed, 0 warnings, 1 passed, 2 not performed"
    )
    assert result.status.name == "OK"


def test_title_of_report_without_any_answer_claims_nothing(machine: Machine) -> None:
    result = diagnose(machine(nvml=Unavailable("silent")), only_checks=("CK027",))

    assert report(result).title == "No check could be performed"


def test_set_variables_are_named_in_one_line(machine: Machine) -> None:
    result = diagnose(machine(variables={"NCCL_DEBUG": "WARN", "CUDA_CACHE_PATH": "/cache"}))

    assert notes(report(result))[0].text == (
        "2 environment variables for CUDA programs are set: CUDA_CACHE_PATH, NCCL_DEBUG"
    )


def test_title_marks_simulated_machine(machine: Machine) -> None:
    assert report(diagnose(machine(simulated=True))).title.startswith("Simulated: ")


# --- all checks ------------------------------------------------------------------------------------


def test_passed_check_takes_one_line(machine: Machine) -> None:
    document = report(diagnose(machine()), show_all=True)

    assert len(notes(section(document, "System"))) == 5
    assert all(isinstance(node, Note) for node in section(document, "System").nodes)


def test_unknown_checks_with_same_reason_share_one_line(machine: Machine) -> None:
    silent = machine(nvml=Unavailable("silent"))

    last = notes(section(report(diagnose(silent), show_all=True), "GPU health"))[-1]

    assert last.level == "info"
    assert last.text == (
        "CK027, CK028, CK029, CK030, CK031, CK032 not performed: NVML does not answer (CK003)"
    )


def test_set_variables_are_listed_with_effect(machine: Machine) -> None:
    result = diagnose(machine(variables={"NCCL_DEBUG": "WARN"}))

    (table,) = section(report(result, show_all=True), "Environment variables that").nodes
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
        node for node in section(paste_report(result), "Passed").nodes if isinstance(node, Facts)
    )
    assert evidence == Facts((("in Python packages", Text("libcudnn.so.9")),))
    assert result.checks[0].evidence == {"package": "libcudnn.so.9"}


# --- the report to paste ---------------------------------------------------------------------------


def test_pasted_report_has_versions_devices_and_evidence(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")
    wrong = machine(**both_views(gpu(0, persistence_mode=False)))

    document = paste_report(diagnose(wrong))

    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == ["Versions", "GPUs", "Problems", "Passed", "Summary"]
    assert any(isinstance(node, Facts) for node in section(document, "Passed").nodes)


def test_pasted_report_has_no_empty_sections(machine: Machine) -> None:
    bare = machine(nvml=Unavailable("silent"), cuda=Unavailable("silent"))

    document = paste_report(diagnose(bare, only_checks=("CK020",)))

    titles = [node.title for node in document.nodes if isinstance(node, Section)]
    assert titles == ["Versions", "Passed", "Summary"]


# --- The recorded result of a real machine; tests/data/doctor-h200.json names the machine and the date ---

DATA = Path(__file__).parents[2] / "data" / "doctor-h200.json"
OUTPUT: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))["output"]
# CK037 and CK038 are newer than the recording.
EARLIER = [name for name in checks_by_id() if name not in ("CK037", "CK038")]


def recorded() -> DoctorResult:
    checks = tuple(
        CheckResult(
            **{**record, "status": Status[record["status"].upper()], "fix": tuple(record["fix"])}
        )
        for record in OUTPUT["checks"]
    )
    return DoctorResult(
        **{
            **{name: value for name, value in OUTPUT.items() if name != "schema"},
            "status": Status[OUTPUT["status"].upper()],
            "devices": tuple(DeviceLine(**record) for record in OUTPUT["devices"]),
            "checks": checks,
        }
    )


def test_recorded_real_machine_has_no_unknown_check() -> None:
    assert OUTPUT["schema"] == "cudakit.doctor/1"
    assert [record["id"] for record in OUTPUT["checks"]] == EARLIER
    assert {record["status"] for record in OUTPUT["checks"]} == {"ok"}


def test_recorded_titles_are_those_of_the_table() -> None:
    assert [record["title"] for record in OUTPUT["checks"]] == [
        checks_by_id()[name].title for name in EARLIER
    ]


def test_recorded_result_is_unchanged_as_json() -> None:
    assert json.loads(render(recorded())) == {**OUTPUT, "variables": []}


@pytest.mark.parametrize("width", [80, 160])
def test_recorded_report_is_unchanged(golden: Callable[[str, str], None], width: int) -> None:
    text = console.render(report(recorded(), show_all=True), width=width, color=False)

    golden(f"doctor-h200-{width}.txt", text)


def test_recorded_pasted_report_is_unchanged(golden: Callable[[str, str], None]) -> None:
    golden(
        "doctor-h200-report.txt", console.render(paste_report(recorded()), width=100, color=False)
    )


WHO = Identity(
    hostname="gpu-box.lab.example", user="ada", home="/data/ada", serials=("1652826064062",)
)

names = st.text(string.ascii_lowercase + string.digits, min_size=4, max_size=12).filter(
    lambda name: name not in _COMMON_NAMES and not name.isdigit()
)
between = st.text(string.ascii_letters + " /:=.,", max_size=20)


def test_uuids_are_redacted_except_their_kind() -> None:
    text = "GPU-6f4890cf-4157-408d-4577-559bc7fea90e, MIG-GPU-6f4890cf/3/0 and GPU-6f48"

    assert redact_value(text, WHO) == "GPU-<uuid>, MIG-GPU-<uuid> and GPU-<uuid>"


def test_host_user_home_and_serial_numbers_are_redacted() -> None:
    text = "gpu-box: /data/ada/venv and /home/bob/x, serial 1652826064062, GPU-BOX.LAB.EXAMPLE, ada"

    assert redact_value(text, WHO) == (
        "<host>: ~/venv and /home/<user>/x, serial <serial>, <host>, <user>"
    )


def test_name_inside_word_is_not_redacted() -> None:
    assert redact_value("Canada, gpu-boxes", WHO) == "Canada, gpu-boxes"


def test_common_names_are_not_redacted() -> None:
    nobody = Identity(hostname="localhost", user="root", home="/", serials=("0",))

    assert redact_value("localhost: root 0 /usr", nobody) == "localhost: root 0 /usr"


@given(identifier=st.uuids(), prefix=st.sampled_from(["GPU-", "MIG-", ""]), around=between)
def test_any_uuid_is_redacted(identifier: uuid.UUID, prefix: str, around: str) -> None:
    text = f"{around} {prefix}{identifier} {around}"

    assert str(identifier) not in redact_value(text, WHO)
    assert str(identifier)[:8] not in redact_value(text, WHO)


@given(host=names, user=names, around=between)
def test_any_name_in_path_or_sentence_is_redacted(host: str, user: str, around: str) -> None:
    who = Identity(hostname=f"{host}.cluster", user=user, home=f"/home/{user}")
    text = f"{around} /home/{user}/env on {host}.cluster, {host.upper()} as {user}; {around}"

    expected_text = redact_value(text, who).lower().replace("/", " ").replace(".", " ").split()

    assert not {host, f"{host},", user, f"{user};"} & set(expected_text)


def test_whole_result_is_redacted(machine: Machine) -> None:
    named_machine = machine(
        variables={"CUDA_INJECTION64_PATH": "/data/ada/libtool.so", "NCCL_TOPO_FILE": "gpu-box"},
        **both_views(gpu(0)),
    )
    result = redact_value(diagnose(named_machine), WHO)

    for text in (render(result), console.render(paste_report(result), width=60, color=False)):
        for secret in ("00112233-4455", "gpu-box", "/data/ada"):
            assert secret not in text
    assert "NVIDIA H200" in render(result)
