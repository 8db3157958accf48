""""""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from devices.doctor.machines import (
    DRIVER,
    FAIL,
    OK,
    UNKNOWN,
    WARN,
    Machine,
    both_views,
    gpu,
    on_bus,
)

from cudakit.devices.doctor.check import (
    Check,
    Finding,
    NotCheckable,
    Status,
    fail,
    join_findings,
    ok,
    warn,
)
from cudakit.devices.doctor.checks import (
    SELF_TEST,
    THEMES,
    checks_by_id,
    diagnose,
    find_check,
    versions,
)
from cudakit.errors import UsageError
from cudakit.gpu.api.facts import Library, RunContext
from cudakit.units import Unavailable

CHECKS = list(checks_by_id().values())
REFERENCE = re.compile(r"CK\d{3}")


def test_ids_are_unique_and_ascending() -> None:
    ids = [check.id for members in (*THEMES.values(), *SELF_TEST.values()) for check in members]

    assert ids == sorted(set(ids))
    assert all(map(REFERENCE.fullmatch, ids))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_check_has_explanation(check: Check) -> None:
    first, blank, *rest = check.explanation.splitlines()

    assert first.endswith((".", ":"))
    assert blank == ""
    assert rest


def test_references_between_checks_exist() -> None:
    for module in {check.examine.__module__ for check in CHECKS}:
        text = Path(str(import_module(module).__file__)).read_text(encoding="utf-8")
        assert set(REFERENCE.findall(text)) <= checks_by_id().keys()


def broken(context: RunContext) -> Finding:
    """Raise an unexpected error."""
    raise ZeroDivisionError(f"over {len(context.variables)}")


def without_fact(context: RunContext) -> Finding:
    """Raise NotCheckable with a reason."""
    raise NotCheckable(f"{len(context.variables)} variables are set")


def test_broken_check_is_unknown() -> None:
    finding = Check("CK900", "it works", broken).run(RunContext())

    assert finding == Finding(UNKNOWN, "internal error in this check: ZeroDivisionError: over 0")


def test_uncheckable_check_is_unknown_with_reason() -> None:
    assert Check("CK901", "it is known", without_fact).run(RunContext()).summary == (
        "0 variables are set"
    )


def test_explanation_is_docstring() -> None:
    explanation = Check("CK900", "it works", broken).explanation

    assert explanation == "Raise an unexpected error."


def test_combined_findings_have_worst_first_and_no_duplicates() -> None:
    finding = join_findings(
        [
            ok("fine"),
            warn("slow", {"a": "1"}, "wait"),
            fail("dead", {"b": "2"}, "repair", "wait"),
        ]
    )

    assert finding == Finding(FAIL, "dead; slow", {"b": "2", "a": "1"}, ("repair", "wait"))


def test_combined_findings_without_problem_are_ok() -> None:
    assert join_findings([ok("some fine"), ok("all fine")]).summary == "all fine"


def test_statuses_ascend_by_severity() -> None:
    assert list(Status) == sorted(Status) == [OK, UNKNOWN, WARN, FAIL]


HERE = [check.id for members in THEMES.values() for check in members]
TRIALS = [check.id for members in SELF_TEST.values() for check in members]


def test_checks_run_in_order_of_themes(machine: Machine, tmp_path: Path) -> None:
    on_bus(tmp_path, "0000:00:00.0")

    result = diagnose(machine())

    assert [check.id for check in result.checks] == HERE
    assert result.counts == {"ok": len(HERE), "unknown": 0, "warn": 0, "fail": 0}
    assert result.status is OK


def test_empty_context_breaks_no_check() -> None:
    result = diagnose(RunContext(), with_self_test=True)

    assert not [check for check in result.checks if "internal error" in check.summary]
    assert result.status is FAIL


def test_result_has_versions_and_devices(machine: Machine) -> None:
    result = diagnose(machine())

    assert result.about["driver"] == f"{DRIVER} (open kernel module)"
    assert result.about["system"] == "Ubuntu 24.04.3 LTS"
    assert [device.name for device in result.devices] == ["NVIDIA H200"]


def test_status_is_worst_of_all_checks(machine: Machine) -> None:
    hot = both_views(gpu(0, persistence_mode=False, remapped_rows_failed=True))

    result = diagnose(machine(variables={"CUDA_LAUNCH_BLOCKING": "1"}, **hot))

    assert (result.status, result.failures, result.warnings) == (FAIL, 1, 2)


def test_checks_are_selected_and_skipped_by_id(machine: Machine) -> None:
    chosen = diagnose(machine(), only_checks=("CK001", "CK020"), skipped_checks=("CK001",))

    assert [check.id for check in chosen.checks] == ["CK020"]


def test_self_test_runs_on_request_only(machine: Machine) -> None:
    assert [check.id for check in diagnose(machine(), with_self_test=True).checks] == HERE + TRIALS
    with pytest.raises(UsageError, match="CK041 uses the GPU"):
        diagnose(machine(), only_checks=("CK041",))


@pytest.mark.parametrize(
    "ask",
    [
        lambda: diagnose(RunContext(), only_checks=("CK999",)),
        lambda: diagnose(RunContext(), skipped_checks=("nonsense",)),
        lambda: find_check("CK999"),
    ],
)
def test_unknown_id_is_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="no check"):
        ask()


@pytest.mark.parametrize("spelling", ["CK005", "ck5", "5", " Ck05 "])
def test_check_is_found_by_short_id(spelling: str) -> None:
    assert find_check(spelling).title == "CUDA starts"


def test_unknown_status_is_no_finding(machine: Machine) -> None:
    result = diagnose(machine(simulated=True), only_checks=("CK002",))

    assert (result.status, result.failures, result.warnings) == (UNKNOWN, 0, 0)


def test_unknown_check_beside_passed_check_leaves_status_ok(machine: Machine) -> None:
    result = diagnose(machine(simulated=True), only_checks=("CK001", "CK002"))

    assert [check.status for check in result.checks] == [OK, UNKNOWN]
    assert result.status is OK


def test_effect_of_a_variable_that_is_off_says_so(machine: Machine) -> None:
    (variable,) = diagnose(machine(variables={"CUDA_LAUNCH_BLOCKING": "0"})).variables

    assert variable.effect.startswith("off; if on, every kernel launch waits")


@pytest.mark.parametrize(
    ("name", "value", "effect"),
    [
        ("NCCL_PXN_DISABLE", "0", "off; if on, transfers over another GPU's network card"),
        ("NCCL_PXN_DISABLE", "1", "transfers over another GPU's network card are disabled"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "f", "off; if on, a timeout writes"),
        ("NCCL_RUNTIME_CONNECT", "", "empty; if on, connections are made"),
        ("KINETO_USE_DAEMON", "0", "any value, even 0: the profiler listens"),
        ("TORCHINDUCTOR_SIZE_ASSERTS", "1", "0: compiled code does not check"),
    ],
)
def test_effect_of_a_variable_is_that_of_its_value(
    machine: Machine, name: str, value: str, effect: str
) -> None:
    (variable,) = diagnose(machine(variables={name: value})).variables

    assert variable.effect.startswith(effect)


def test_version_of_nvml_is_the_one_that_nvml_reports(machine: Machine) -> None:
    context = machine()
    silent = machine(
        nvml=Unavailable("silent"),
        libraries=(Library("libnvidia-ml.so.1", "/l", f"/l/libnvidia-ml.so.{DRIVER}", "system"),),
    )

    assert versions(context)["NVML"] == f"13.{DRIVER}"
    assert versions(silent)["NVML"] == f"libnvidia-ml {DRIVER}"


def test_set_variables_have_value_effect_and_source(machine: Machine) -> None:
    variables = {"PATH": "/bin", "TORCH_BLAS_PREFER_CUBLASLT": "1"}

    (finding,) = diagnose(machine(variables=variables)).variables

    assert (finding.name, finding.value, finding.library) == (
        "TORCH_BLAS_PREFER_CUBLASLT",
        "1",
        "PyTorch",
    )
    assert "cuBLASLt" in finding.effect
    assert finding.source == "aten/src/ATen/Context.h"
