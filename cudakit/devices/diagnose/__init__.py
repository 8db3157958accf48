"""``doctor``: diagnose the CUDA set-up and GPU health by checks of a RunContext."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Collection

from cudakit.devices.diagnose.check import (
    SCHEMA,
    Check,
    CheckResult,
    DeviceLine,
    DoctorResult,
    Status,
    overall_status,
)
from cudakit.devices.diagnose.checks import SELF_TEST, THEMES, checks_by_id, id_ranges
from cudakit.devices.diagnose.driver import (
    cuda_text,
    driver_cuda,
    libcuda_path,
    nvml_library_version,
)
from cudakit.devices.diagnose.variables import set_variables
from cudakit.errors import UsageError
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

# The packages whose versions a report lists.
_REPORTED_PACKAGES = (
    "cudakit",
    "torch",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "jax",
    "numba",
    "numba-cuda",
    "triton",
    "cuda-bindings",
    "cuda-core",
    "nvidia-ml-py",
    "nvtx",
)


def diagnose(
    context: RunContext,
    *,
    only_checks: Collection[str] = (),
    skipped_checks: Collection[str] = (),
    with_self_test: bool = False,
) -> DoctorResult:
    """Run all checks, or those in ``only_checks``, except those in ``skipped_checks``.

    ``with_self_test`` adds the self-test. Raises UsageError for an id that no check has, and for a check of
    the self-test without ``with_self_test``.
    """
    only_checks, skipped_checks = selected_ids(
        only_checks, skipped_checks, with_self_test=with_self_test
    )
    themes = {**THEMES, **SELF_TEST} if with_self_test else THEMES
    checks = tuple(
        _run_check(theme, check, context)
        for theme, checks_of_theme in themes.items()
        for check in checks_of_theme
        if (not only_checks or check.id in only_checks) and check.id not in skipped_checks
    )
    counts = Counter(check.status for check in checks)
    return DoctorResult(
        schema=SCHEMA,
        simulated=context.simulated,
        status=overall_status(counts),
        counts={status.name.lower(): counts[status] for status in Status},
        about=versions(context),
        devices=tuple(
            _device_line(device)
            for device in context.nvml_devices or context.cuda_devices
            if device.parent is None
        ),
        checks=checks,
        variables=set_variables(context),
    )


def _run_check(theme: str, check: Check, context: RunContext) -> CheckResult:
    finding = check.run(context)
    return CheckResult(
        check.id, theme, check.title, finding.status, finding.summary, finding.evidence, finding.fix
    )


def selected_ids(
    only_checks: Collection[str], skipped_checks: Collection[str], *, with_self_test: bool
) -> tuple[set[str], set[str]]:
    """Return the full ids of the checks in ``only_checks`` and of those in ``skipped_checks``.

    Raises UsageError for an id that no check has, for a self-test without ``with_self_test``, and if no check
    is left.
    """
    only_ids, skip_ids = (
        {find_check(name).id for name in check_names}
        for check_names in (only_checks, skipped_checks)
    )
    self_tests = {
        check.id for checks_of_theme in SELF_TEST.values() for check in checks_of_theme
    } & only_ids
    if self_tests and not with_self_test:
        raise UsageError(
            f"{', '.join(sorted(self_tests))} uses the GPU", hint="add --deep to allow that"
        )
    if only_ids and only_ids <= skip_ids:
        raise UsageError("--skip excludes every check of --only", hint="remove --skip")
    return only_ids, skip_ids


def find_check(name: str) -> Check:
    """Return the check with an id such as CK005, ck5 or 5. Raises UsageError if no check has the id."""
    check_by_id = checks_by_id()
    match = re.fullmatch(r"(?:CK)?0*(\d{1,3})", name.strip(), re.IGNORECASE)
    check = check_by_id.get(f"CK{int(match[1]):03}") if match else None
    if check is None:
        raise UsageError(
            f"no check {name!r}",
            hint=f"ids are {id_ranges()}; cudakit doctor --all --deep lists the checks",
        )
    return check


# --- versions and devices --------------------------------------------------------------------------


def versions(context: RunContext) -> dict[str, str]:
    """Return the versions of system, driver and packages by label; unknown versions are left out."""
    supported_cuda = driver_cuda(context)
    versions_by_label = {
        "system": context.host.distribution,
        "kernel": context.host.kernel,
        "container": context.host.container or ("WSL" if context.host.is_wsl else ""),
        "driver": _driver_text(context),
        "NVML": _nvml_text(context),
        "CUDA of the driver": None if supported_cuda is None else cuda_text(supported_cuda),
        "libcuda": libcuda_path(context),
        "Python": "" if context.simulated else platform.python_version(),
        **_package_versions(context),
    }
    return {label: text for label, text in versions_by_label.items() if text}


def _driver_text(context: RunContext) -> str | None:
    kernel_module = context.driver.module
    if kernel_module:
        return f"{kernel_module.version} ({'open' if kernel_module.is_open else 'proprietary'} kernel module)"
    version = None if isinstance(context.nvml, Unavailable) else context.nvml.driver_version
    return version if isinstance(version, str) else None


def _nvml_text(context: RunContext) -> str | None:
    if not isinstance(context.nvml, Unavailable) and isinstance(context.nvml.nvml_version, str):
        return context.nvml.nvml_version
    library_version = nvml_library_version(context)
    return f"libnvidia-ml {library_version}" if library_version else None


def _package_versions(context: RunContext) -> dict[str, str]:
    if isinstance(context.software.distributions, Unavailable):
        return {}
    installed_versions = {
        package.name: package.version for package in reversed(context.software.distributions)
    }
    return {
        name: installed_versions[name] for name in _REPORTED_PACKAGES if name in installed_versions
    }


def _device_line(device: DeviceFacts) -> DeviceLine:
    def field_text(name: str) -> str | Unavailable:
        field_value = device.fields.get(name, Unavailable("not known"))
        return field_value if isinstance(field_value, (str, Unavailable)) else str(field_value)

    memory_bytes = device.fields.get("memory_total_bytes", device.fields.get("usable_memory_bytes"))
    return DeviceLine(
        index=device.index,
        name=field_text("name"),
        uuid=device.uuid,
        pci_bus_id=device.pci_bus_id,
        compute_capability=field_text("compute_capability"),
        memory_bytes=memory_bytes if isinstance(memory_bytes, int) else Unavailable("not known"),
    )
