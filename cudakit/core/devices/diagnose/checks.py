"""The table of all checks, by theme. The id of a dropped check is never reused."""

from __future__ import annotations

from cudakit.core.devices.diagnose import (
    cuda,
    driver,
    health,
    kernel,
    modes,
    packages,
    system,
    variables,
)
from cudakit.core.devices.diagnose.check import Check

THEMES: dict[str, tuple[Check, ...]] = {
    "Driver": (
        Check("CK001", "the NVIDIA driver is loaded", driver.driver_loaded),
        Check("CK002", "the device nodes can be opened", kernel.device_nodes),
        Check("CK003", "NVML answers", driver.nvml_answers),
        Check("CK004", "the driver's parts are of one version", driver.versions_agree),
        Check("CK005", "CUDA starts", cuda.cuda_starts),
        Check("CK006", "the NVSwitch fabric is ready", modes.fabric),
        Check("CK007", "every GPU of the machine answers", kernel.gpus_on_bus),
    ),
    "Libraries and packages": (
        Check("CK008", "libcuda is the driver's own", driver.libcuda_origin),
        Check("CK009", "the driver is new enough for what is installed", packages.driver_version),
        Check("CK010", "the installed builds support the GPUs", packages.architectures),
        Check("CK011", "the frameworks are built for CUDA", packages.framework_builds),
        Check("CK012", "no copy of a CUDA library hides another", packages.shadowed_libraries),
        Check("CK013", "no package replaces another's module", packages.module_conflicts),
    ),
    "Visibility": (
        Check("CK014", "CUDA_VISIBLE_DEVICES shows what it names", cuda.visible_devices),
        Check("CK015", "CUDA and nvidia-smi count alike", cuda.device_order),
        Check("CK016", "the container has GPU and driver", system.container),
        Check("CK017", "GPUs in MIG mode have instances", modes.mig_instances),
        Check("CK018", "any number of processes may use a GPU", modes.compute_mode),
        Check("CK019", "MPS is reachable or not in use", system.mps),
    ),
    "Settings": (
        Check("CK020", "no variable for finding errors is left set", variables.debugging),
        Check("CK021", "PyTorch's allocator settings are valid", variables.allocator),
        Check("CK022", "no NCCL variable switches a fast path off", variables.nccl),
        Check("CK023", "no variable slows cuBLAS and cuDNN down", variables.math_libraries),
        Check("CK024", "no variable is misspelt", variables.misspelt),
    ),
    "Profilers": (
        Check("CK025", "no other tool holds CUPTI", system.cupti_holders),
        Check("CK026", "performance counters may be read", system.performance_counters),
    ),
    "Health": (
        Check("CK027", "memory has no uncorrected errors", health.memory_errors),
        Check("CK028", "no memory waits for repair", health.memory_repairs),
        Check("CK029", "PCIe links are as wide and fast as they can be", health.pcie_links),
        Check("CK030", "no GPU is slowed down by heat or power", health.throttling),
        Check("CK031", "power limits are not below their default", health.power_limits),
        Check("CK032", "the driver stays on the GPUs", health.persistence),
        Check("CK033", "the kernel's log tells of no Xid", kernel.xids),
    ),
    "System": (
        Check("CK034", "shared memory is large enough", system.shared_memory),
        Check("CK035", "no limit keeps CUDA from memory", system.memory_limits),
        Check("CK036", "WSL uses the driver of Windows", system.wsl_libraries),
    ),
}

# Run on request only: these use the GPU.
SELF_TEST: dict[str, tuple[Check, ...]] = {
    "Trial": (
        Check("CK041", "a context can be made", cuda.context_step),
        Check("CK042", "NVRTC compiles for the GPU", cuda.compile_step),
        Check("CK043", "a kernel computes what it should", cuda.kernel_step),
        Check("CK044", "copies are exact", cuda.copy_step),
    ),
}


def checks_by_id() -> dict[str, Check]:
    """Return all checks by id."""
    groups = (*THEMES.values(), *SELF_TEST.values())
    return {check.id: check for group in groups for check in group}
