"""The table of all checks, by theme. The id of a removed check is never reused."""

from __future__ import annotations

from cudakit.devices.diagnose import (
    cuda,
    driver,
    health,
    kernel,
    modes,
    packages,
    system,
    variables,
    xids,
)
from cudakit.devices.diagnose.check import Check

THEMES: dict[str, tuple[Check, ...]] = {
    "Driver": (
        Check("CK001", "the NVIDIA driver is loaded", driver.driver_loaded),
        Check("CK002", "the device nodes can be opened", kernel.device_nodes),
        Check("CK003", "NVML answers", driver.nvml_answers),
        Check("CK004", "all parts of the driver have the same version", driver.versions_agree),
        Check("CK005", "CUDA starts", cuda.cuda_starts),
        Check("CK006", "the NVSwitch fabric is ready", modes.fabric),
        Check("CK007", "NVML reports every GPU on the PCI bus", kernel.gpus_on_bus),
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
        Check("CK017", "GPUs in MIG mode have instances", modes.mig_instances),
        Check("CK018", "several processes can use each GPU", modes.compute_mode),
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
        Check("CK027", "no GPU has uncorrectable memory errors", health.memory_errors),
        Check("CK028", "no memory repair is pending", health.memory_repairs),
        Check("CK029", "PCIe links have their full width and speed", health.pcie_links),
        Check("CK030", "no GPU is throttled", health.throttling),
        Check("CK031", "power limits are not below their default", health.power_limits),
        Check("CK032", "the driver keeps GPUs initialized", health.persistence),
        Check("CK033", "the kernel log has no Xid errors", xids.xids),
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
    checks_by_theme = (*THEMES.values(), *SELF_TEST.values())
    return {check.id: check for checks_of_theme in checks_by_theme for check in checks_of_theme}


def id_ranges() -> str:
    """Return the ids of all checks as ranges: ``CK001 to CK037, CK041 to CK044``."""
    ranges: list[list[int]] = []
    for check_number in sorted(int(check_id.removeprefix("CK")) for check_id in checks_by_id()):
        if ranges and check_number == ranges[-1][-1] + 1:
            ranges[-1].append(check_number)
        else:
            ranges.append([check_number])
    return ", ".join(
        f"CK{number_range[0]:03} to CK{number_range[-1]:03}" for number_range in ranges
    )
