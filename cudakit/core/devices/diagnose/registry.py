"""All checks, by theme. An id belongs to its question for ever; one that is dropped is not given again."""

from __future__ import annotations

from cudakit.core.devices.diagnose import (
    allocator,
    architectures,
    container,
    cublas,
    cuda,
    deep,
    driver,
    libraries,
    limits,
    memory,
    nccl,
    nodes,
    pace,
    packages,
    profilers,
    settings,
    visibility,
    xid,
)
from cudakit.core.devices.diagnose.check import Check

THEMES: dict[str, tuple[Check, ...]] = {
    "Driver": (
        Check("CK001", "the NVIDIA driver is loaded", driver.loaded),
        Check("CK002", "the device nodes can be opened", nodes.nodes_open),
        Check("CK003", "NVML answers", driver.nvml_answers),
        Check("CK004", "the driver's parts are of one version", driver.one_version),
        Check("CK005", "CUDA starts", cuda.initialises),
        Check("CK006", "the NVSwitch fabric is ready", cuda.fabric_ready),
        Check("CK007", "every GPU of the machine answers", nodes.every_gpu_answers),
    ),
    "Libraries and packages": (
        Check("CK008", "libcuda is the driver's own", libraries.drivers_libcuda),
        Check(
            "CK009", "the driver is new enough for what is installed", packages.driver_new_enough
        ),
        Check("CK010", "the installed builds support the GPUs", architectures.supported),
        Check("CK011", "the frameworks are built for CUDA", packages.built_for_cuda),
        Check("CK012", "no copy of a CUDA library hides another", libraries.one_copy),
        Check("CK013", "no package replaces another's module", packages.modules_unique),
    ),
    "Visibility": (
        Check("CK014", "CUDA_VISIBLE_DEVICES shows what it names", visibility.visible_devices),
        Check("CK015", "CUDA and nvidia-smi count alike", visibility.device_order),
        Check("CK016", "the container has GPU and driver", container.container_settings),
        Check("CK017", "GPUs in MIG mode have instances", visibility.mig_instances),
        Check("CK018", "any number of processes may use a GPU", visibility.compute_mode),
        Check("CK019", "MPS is reachable or not in use", container.mps),
    ),
    "Settings": (
        Check("CK020", "no variable for finding errors is left set", settings.nothing_slows),
        Check("CK021", "PyTorch's allocator settings are valid", allocator.allocator_settings),
        Check("CK022", "no NCCL variable switches a fast path off", nccl.nccl_settings),
        Check("CK023", "no variable slows cuBLAS and cuDNN down", cublas.math_settings),
        Check("CK024", "no variable is misspelt", settings.nothing_misspelt),
    ),
    "Profilers": (
        Check("CK025", "no other tool holds CUPTI", profilers.profiler_free),
        Check("CK026", "performance counters may be read", profilers.counters_permitted),
    ),
    "Health": (
        Check("CK027", "memory has no uncorrected errors", memory.memory_errors),
        Check("CK028", "no memory waits for repair", memory.memory_repairs),
        Check("CK029", "PCIe links are as wide and fast as they can be", pace.pcie_link),
        Check("CK030", "no GPU is slowed down by heat or power", pace.throttling),
        Check("CK031", "power limits are not below their default", pace.power_limit),
        Check("CK032", "the driver stays on the GPUs", pace.persistence),
        Check("CK033", "the kernel's log tells of no Xid", xid.no_xids),
    ),
    "System": (
        Check("CK034", "shared memory is large enough", limits.shared_memory),
        Check("CK035", "no limit keeps CUDA from memory", limits.process_limits),
        Check("CK036", "WSL uses the driver of Windows", container.wsl_libraries),
    ),
}

# Taken only where asked for: they use the GPU.
DEEP: dict[str, tuple[Check, ...]] = {
    "Trial": (
        Check("CK041", "a context can be made", deep.context),
        Check("CK042", "NVRTC compiles for the GPU", deep.compiler),
        Check("CK043", "a kernel computes what it should", deep.kernel),
        Check("CK044", "copies are exact", deep.copies),
    ),
}


def every_check() -> dict[str, Check]:
    """Return all checks by id."""
    groups = (*THEMES.values(), *DEEP.values())
    return {check.id: check for group in groups for check in group}
