"""The table of all checks, by theme. The id of a removed check is never reused."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Collection

from cudakit.devices.doctor import cuda, driver, gpus, packages, system, variables
from cudakit.devices.doctor.check import (
    Check,
    CheckResult,
    DeviceLine,
    DoctorResult,
    Status,
)
from cudakit.devices.doctor.driver import cuda_text, driver_cuda, libcuda_path, nvml_library_version
from cudakit.devices.doctor.variables import set_variables
from cudakit.errors import UsageError
from cudakit.gpu.api.facts import DeviceFacts, RunContext
from cudakit.units import Unavailable

THEMES: dict[str, tuple[Check, ...]] = {
    "Driver": (
        Check("CK001", "the NVIDIA driver is loaded", driver.driver_loaded),
        Check("CK002", "the device nodes can be opened", driver.device_nodes),
        Check("CK003", "NVML answers", driver.nvml_answers),
        Check("CK004", "all parts of the driver have the same version", driver.versions_agree),
        Check("CK005", "CUDA starts", cuda.cuda_starts),
        Check("CK006", "the NVSwitch fabric is ready", cuda.fabric),
        Check("CK007", "NVML reports every GPU on the PCI bus", driver.gpus_on_bus),
    ),
    "Libraries and packages": (
        Check("CK008", "libcuda belongs to the driver", driver.libcuda_origin),
        Check("CK009", "the driver is new enough for the packages", packages.driver_version),
        Check("CK010", "the installed builds support the GPUs", packages.architectures),
        Check("CK011", "the frameworks are built for CUDA", packages.framework_builds),
        Check("CK012", "LD_LIBRARY_PATH shadows no CUDA library", packages.shadowed_libraries),
        Check("CK013", "no two packages install the same module", packages.module_conflicts),
    ),
    "Visibility": (
        Check("CK014", "CUDA_VISIBLE_DEVICES is valid", cuda.visible_devices),
        Check("CK015", "CUDA and nvidia-smi use the same order", cuda.device_order),
        Check("CK016", "the container has GPU and driver", system.container),
        Check("CK017", "GPUs in MIG mode have instances", cuda.mig_instances),
        Check("CK018", "several processes can use each GPU", cuda.compute_mode),
        Check("CK019", "MPS works or is not in use", system.mps),
    ),
    "Environment variables": (
        Check("CK020", "no debugging variable is set", variables.debugging),
        Check("CK021", "allocator settings are valid", variables.allocator),
        Check("CK022", "no NCCL variable disables a kind of transfer", variables.nccl),
        Check("CK023", "no variable slows down cuBLAS or cuDNN", variables.math_libraries),
        Check("CK024", "no environment variable is misspelled", variables.misspelled),
    ),
    "Profilers": (
        Check("CK025", "no other tool uses CUPTI", system.cupti_users),
        Check("CK026", "performance counters can be read", system.performance_counters),
    ),
    "GPU health": (
        Check("CK027", "no GPU has uncorrectable memory errors", gpus.memory_errors),
        Check("CK028", "no memory repair is pending", gpus.memory_repairs),
        Check("CK029", "PCIe links have their full width and speed", gpus.pcie_links),
        Check("CK030", "no GPU is throttled", gpus.throttling),
        Check("CK031", "power limits are not below their default", gpus.power_limits),
        Check("CK032", "the driver keeps GPUs initialized", gpus.persistence),
        Check("CK033", "the kernel log has no Xid errors", system.xids),
    ),
    "System": (
        Check("CK034", "shared memory is large enough", system.shared_memory),
        Check("CK035", "no limit prevents CUDA from reserving memory", system.memory_limits),
        Check("CK036", "WSL uses the Windows driver", system.wsl_libraries),
        Check("CK037", "cudakit's compiled extensions are installed", system.compiled_extensions),
        Check("CK038", "GPUDirect Storage is complete, or not set up", system.gpudirect_storage),
    ),
}

# Checks that run with --deep only, because they use the GPU.
SELF_TEST: dict[str, tuple[Check, ...]] = {
    "Self-test": (
        Check("CK041", "a CUDA context can be created", cuda.context_step),
        Check("CK042", "NVRTC compiles for the GPU", cuda.compile_step),
        Check("CK043", "a kernel computes correct results", cuda.kernel_step),
        Check("CK044", "copies are correct", cuda.copy_step),
    ),
}


def checks_by_id() -> dict[str, Check]:
    """Return all checks by id."""
    themes = (*THEMES.values(), *SELF_TEST.values())
    return {check.id: check for checks in themes for check in checks}


def id_ranges() -> str:
    """Return the ids of all checks as ranges: ``CK001 to CK037, CK041 to CK044``."""
    ranges: list[list[int]] = []
    for number in sorted(int(check_id.removeprefix("CK")) for check_id in checks_by_id()):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(f"CK{numbers[0]:03} to CK{numbers[-1]:03}" for numbers in ranges)


# --- ``doctor``: diagnose the CUDA set-up and GPU health by checks of a RunContext -----------------

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
        CheckResult(
            check.id, theme, check.title, found.status, found.summary, found.evidence, found.fix
        )
        for theme, checks_of_theme in themes.items()
        for check in checks_of_theme
        if (not only_checks or check.id in only_checks) and check.id not in skipped_checks
        for found in [check.run(context)]
    )
    counts = Counter(check.status for check in checks)
    return DoctorResult(
        simulated=context.simulated,
        status=max(
            counts.keys() - {Status.UNKNOWN}, default=Status.UNKNOWN if counts else Status.OK
        ),
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


def selected_ids(
    only_checks: Collection[str], skipped_checks: Collection[str], *, with_self_test: bool
) -> tuple[set[str], set[str]]:
    """Return the full ids of the checks in ``only_checks`` and of those in ``skipped_checks``.

    Raises UsageError for an id that no check has, for a self-test without ``with_self_test``, and if no check
    is left.
    """
    only_ids = {find_check(name).id for name in only_checks}
    skip_ids = {find_check(name).id for name in skipped_checks}
    self_tests = {check.id for checks in SELF_TEST.values() for check in checks} & only_ids
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
    module, nvml = context.driver.module, context.nvml
    driver = nvml_version = ""
    if not isinstance(nvml, Unavailable):
        driver = nvml.driver_version if isinstance(nvml.driver_version, str) else ""
        nvml_version = nvml.nvml_version if isinstance(nvml.nvml_version, str) else ""
    if module:
        driver = f"{module.version} ({'open' if module.is_open else 'proprietary'} kernel module)"
    if not nvml_version and (library_version := nvml_library_version(context)):
        nvml_version = f"libnvidia-ml {library_version}"
    packages = context.software.distributions
    installed = {
        package.name: package.version
        for package in reversed(() if isinstance(packages, Unavailable) else packages)
    }
    texts = {
        "system": context.host.distribution,
        "kernel": context.host.kernel,
        "container": context.host.container or ("WSL" if context.host.is_wsl else ""),
        "driver": driver,
        "NVML": nvml_version,
        "CUDA of the driver": None if supported_cuda is None else cuda_text(supported_cuda),
        "libcuda": libcuda_path(context),
        "Python": "" if context.simulated else platform.python_version(),
        **{name: installed[name] for name in _REPORTED_PACKAGES if name in installed},
    }
    return {label: text for label, text in texts.items() if text}


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
