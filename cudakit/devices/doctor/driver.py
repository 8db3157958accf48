"""Checks of the driver (CK001, CK003, CK004, CK008), and the versions of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cudakit.devices.doctor.check import (
    Finding,
    NotCheckable,
    Status,
    count_of,
    fail,
    ok,
    require_fact,
    warn,
)
from cudakit.gpu.api.facts import NvmlView, RunContext
from cudakit.units import Unavailable

_VERSION_SUFFIX = re.compile(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)$")
_INSTALL_GUIDE = "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/"
_INSTALL_COMMANDS = {
    "ubuntu": "sudo ubuntu-drivers install",
    "debian": "sudo apt install nvidia-driver",
    "arch": "sudo pacman -S nvidia-open",
}


def driver_loaded(context: RunContext) -> Finding:
    """CUDA needs NVIDIA's kernel module.

    The check reads /proc/driver/nvidia/version, which containers share with their host. In a sandbox that
    hides this file, an answer from NVML or CUDA also shows that the driver is loaded. Otherwise the check
    reports the probable cause: no GPU on the PCI bus, the nouveau driver instead, a module that was not
    built for this kernel, or an unsigned module that Secure Boot refuses.
    """
    module = context.driver.module
    if module:
        module_kind = "open" if module.is_open else "proprietary"
        return ok(f"driver {module.version} is loaded ({module_kind} kernel module)")
    version = _answering_driver(context)
    if version:
        explanation = "" if context.simulated else " (/proc/driver/nvidia is hidden here)"
        return ok(f"driver {version} answers{explanation}")
    if not context.host.is_wsl:
        return _driver_not_loaded(context)
    exists_by_path = {
        "/dev/dxg": any(node.path == "/dev/dxg" for node in context.driver.device_nodes),
        "/usr/lib/wsl/lib/libcuda.so.1": context.driver.wsl_libcuda,
    }
    return fail(
        "the Windows driver does not answer in WSL",
        {path: "present" if exists else "not found" for path, exists in exists_by_path.items()},
        "install the NVIDIA driver in Windows (never in WSL), then run in PowerShell: "
        "wsl --update; wsl --shutdown",
    )


def _answering_driver(context: RunContext) -> str | None:
    """Return the version of the driver that NVML or CUDA reaches, or None if neither reaches a driver."""
    if not isinstance(context.nvml, Unavailable):
        version = context.nvml.driver_version
        return "of unknown version" if isinstance(version, Unavailable) else version
    if not isinstance(context.cuda, Unavailable) and context.cuda.error is None:
        return "of unknown version"
    return None


def require_nvml(context: RunContext) -> NvmlView:
    """Return the query result of NVML. Raises NotCheckable if NVML does not answer, which CK003 reports."""
    return require_fact(context.nvml, "NVML does not answer (CK003)")


def require_driver(context: RunContext) -> None:
    """Raise NotCheckable if no driver is loaded, which CK001 reports."""
    if driver_loaded(context).status is Status.FAIL:
        raise NotCheckable("the driver is not loaded (CK001)")


def _driver_not_loaded(context: RunContext) -> Finding:
    gpus = context.driver.pci_gpus
    evidence = {"/proc/driver/nvidia/version": "not found"}
    if gpus:
        evidence["PCI bus"] = ", ".join(
            f"{gpu.address} ({gpu.driver or 'no driver'})" for gpu in gpus
        )
    if any(gpu.driver == "nouveau" for gpu in gpus) or context.driver.nouveau_loaded:
        return fail(
            "the GPU uses the nouveau driver, which does not support CUDA",
            evidence,
            *_install_fixes(context.host.distribution_id),
            "then disable nouveau: echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/nouveau.conf, "
            "update the initramfs and reboot",
        )
    if gpus:
        kernel_release = context.host.kernel or "?"
        evidence["kernel"] = kernel_release
        if context.host.container:
            return fail(
                "the NVIDIA driver is not loaded on the host",
                evidence,
                "load or install the driver on the host; a container cannot do that",
            )
        if not context.driver.module_installed:
            return fail(
                f"no NVIDIA kernel module is installed for kernel {kernel_release}",
                evidence,
                *_install_fixes(context.host.distribution_id),
                "after a kernel update: sudo dkms autoinstall, or boot the previous kernel",
            )
        signing_fix: tuple[str, ...] = ()
        if context.host.secure_boot:
            evidence["Secure Boot"] = "on: modules must be signed with an enrolled key"
            signing_fix = (
                "enroll the key that signs the module (mokutil --import), or turn Secure Boot off",
            )
        return fail(
            "the NVIDIA kernel module is installed but not loaded",
            evidence,
            "sudo modprobe nvidia && sudo dmesg | grep -i nvrm | tail",
            *signing_fix,
        )
    evidence["PCI bus"] = "no NVIDIA GPU"
    return fail(
        "no NVIDIA GPU and no NVIDIA driver found",
        evidence,
        "use a machine with a GPU, or pass the GPU through to this virtual machine",
        "cudakit doctor --gpu sim shows the report for a simulated GPU",
    )


def _install_fixes(distribution_id: str) -> tuple[str, ...]:
    command = _INSTALL_COMMANDS.get(distribution_id)
    return (
        (command, f"or follow {_INSTALL_GUIDE}")
        if command
        else (f"install the driver: {_INSTALL_GUIDE}",)
    )


def nvml_answers(context: RunContext) -> Finding:
    """nvidia-smi and all monitors read the state of GPUs through NVML, the driver's management library.

    CUDA works without NVML, but the health of the GPUs is then unknown. Usual causes: the container was
    started without the driver capability "utility"; libnvidia-ml and the kernel module have different
    versions (CK004); or the container has lost its device nodes, and NVML returns Unknown Error (CK002).
    """
    if not isinstance(context.nvml, Unavailable):
        gpu_count = sum(device.parent is None for device in context.nvml.devices)
        version = context.nvml.nvml_version
        version_text = "" if isinstance(version, Unavailable) else f" {version}"
        return ok(f"NVML{version_text} answers and sees {count_of(gpu_count, 'GPU')}")
    require_driver(context)
    reason, container = context.nvml.reason, context.host.container
    if context.host.is_jetson:
        return ok("NVML does not answer, which is normal on this Jetson", {"NVML": reason})
    if "different versions" in reason.lower():
        fix = "update the libraries to the kernel module's version, or reboot (CK004)"
    elif "unknown error" in reason.lower() and container:
        fix = "restart the container, which has lost its device nodes (CK002)"
    elif container:
        fix = "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    else:
        fix = "install the driver's libraries (nvidia-utils) in the version of the kernel module"
    return fail(f"NVML does not answer: {reason}", {}, fix)


def versions_agree(context: RunContext) -> Finding:
    """The kernel module, libnvidia-ml and libcuda must have the same driver version.

    After a driver update the new libraries are on disk while the old module is still loaded: NVML then
    reports "Driver/library version mismatch", and cuInit fails with 803. A container keeps the libraries
    that it got when it started. A libcuda from cuda-compat has another version on purpose (CK008).
    """
    module = context.driver.module
    loads_compat = "compat" in (libcuda_path(context) or "")
    parts = {
        "kernel module": module.version if module else None,
        "libnvidia-ml": nvml_library_version(context),
        "libcuda": None if loads_compat else _version_in_name(libcuda_path(context)),
    }
    versions = {part: version for part, version in parts.items() if version}
    if len(versions) < 2:
        require_driver(context)
        raise NotCheckable("fewer than two parts of the driver report their version")
    if len(set(versions.values())) == 1:
        *others, last = versions
        summary = f"{', '.join(others)} and {last} have the same version, {versions[last]}"
        return ok(summary, versions)
    return fail(
        "parts of the driver have different versions: "
        + ", ".join(f"{part} {version}" for part, version in versions.items()),
        versions,
        "reboot; or end all GPU processes and reload the modules: "
        "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia",
        "restart containers that were started before the update",
    )


def libcuda_origin(context: RunContext) -> Finding:
    """Programs should load the driver's own libcuda, unless cuda-compat is needed and supported.

    Two other libraries can replace the driver's: the stub of the CUDA toolkit, which exists only for
    linking and fails with error 34; and the library of the package cuda-compat, which adds a newer CUDA to
    an older driver. cuda-compat supports data-center GPUs only (others: error 804) and must be newer than
    the driver: an older one, as in old container images, hides the driver's newer CUDA or fails with error
    803. Source: CUDA Compatibility, section Forward Compatibility.
    """
    loaded_path = libcuda_path(context)
    if loaded_path is None:
        require_driver(context)
        raise NotCheckable("no libcuda was found (CK005)")
    evidence = {"libcuda": loaded_path}
    libraries = context.software.libraries
    copies = dict.fromkeys(
        library.real
        for library in (() if isinstance(libraries, Unavailable) else libraries)
        if library.soname == "libcuda.so.1" and library.real != loaded_path
    )
    if copies:
        evidence["other copies"] = ", ".join(copies)
    if "/stubs/" in loaded_path:
        summary = "the stub libcuda is loaded, which cannot run any program"
        return fail(summary, evidence, _remove_from_path("stubs"))
    if "compat" not in loaded_path:
        return ok(f"libcuda belongs to the driver: {loaded_path}", evidence)
    libcuda, module = _version_in_name(libcuda_path(context)), context.driver.module
    evidence["kernel module"] = module.version if module else "?"
    if context.cuda_error in (803, 804):
        reason = (
            "this GPU does not support it"
            if context.cuda_error == 804
            else "it does not suit this driver"
        )
        return fail(
            f"libcuda comes from cuda-compat, but {reason} ({context.cuda_error})",
            evidence,
            _remove_from_path("compat"),
        )
    if libcuda and module and version_numbers(libcuda) < version_numbers(module.version):
        return warn(
            f"libcuda {libcuda} of cuda-compat is older than driver {module.version} and hides its CUDA",
            evidence,
            _remove_from_path("compat"),
        )
    return ok(f"libcuda comes from cuda-compat (forward compatibility): {loaded_path}", evidence)


def _remove_from_path(directory: str) -> str:
    return (
        f"remove the directory {directory} from LD_LIBRARY_PATH or /etc/ld.so.conf.d, "
        "or uninstall its package"
    )


# --- versions of the driver's parts ----------------------------------------------------------------


def nvml_library_version(context: RunContext) -> str | None:
    """Return the driver version of libnvidia-ml, None if it is unknown."""
    nvml = context.nvml
    if not isinstance(nvml, Unavailable) and isinstance(nvml.nvml_version, str):
        return nvml.nvml_version.partition(".")[2] or None
    return _version_in_name(_first_copy_path(context, "libnvidia-ml.so.1"))


def libcuda_path(context: RunContext) -> str | None:
    """Return the path of the libcuda that CUDA loaded, or else of the first libcuda on the loader's path."""
    cuda = context.cuda
    if not isinstance(cuda, Unavailable) and isinstance(cuda.libcuda, str):
        return cuda.libcuda
    return _first_copy_path(context, "libcuda.so.1")


def _version_in_name(path: str | None) -> str | None:
    """Return the driver version in a file name: 580.65.06 for libcuda.so.580.65.06, None for libcuda.so.1."""
    match = _VERSION_SUFFIX.search(path or "")
    return match[1] if match else None


def _first_copy_path(context: RunContext, soname: str) -> str | None:
    libraries = context.software.libraries
    copies = () if isinstance(libraries, Unavailable) else libraries
    return next((library.real for library in copies if library.soname == soname), None)


def driver_cuda(context: RunContext) -> tuple[int, int] | None:
    """Return the version of CUDA that the driver supports, or None if it is unknown."""
    version = None if isinstance(context.cuda, Unavailable) else context.cuda.driver_version
    return version if isinstance(version, tuple) else None


def version_numbers(version: str) -> tuple[int, ...]:
    """Convert a version to a tuple of numbers, for comparisons: 580.65.06 to (580, 65, 6)."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version))


def cuda_text(version: tuple[int, int | None]) -> str:
    """Format a version of CUDA: 13.0, or 13.x if the minor number is unknown."""
    major, minor = version
    return f"{major}.{'x' if minor is None else minor}"


# --- Checks of the device nodes and the PCI bus (CK002, CK007) -------------------------------------

_GPU_NODE = re.compile(r"/dev/nvidia\d+")
_UVM_NODE = "/dev/nvidia-uvm"
_CONTROL_NODE = "/dev/nvidiactl"
_CONTAINER_FIX = "docker run --gpus all ...  (or --device nvidia.com/gpu=all with CDI)"
_LOG_COMMAND = "sudo dmesg | grep -iE 'nvrm|xid' | tail"
# Kernel drivers that pass a GPU through to a virtual machine.
_PASS_THROUGH_DRIVERS = ("vfio-pci", "pci-stub")


def device_nodes(context: RunContext) -> Iterator[Finding]:
    """Programs access the driver through the files /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0 and so on.

    EPERM: the container's control group forbids the device. The container was started without the GPU, or
    lost it when systemd reloaded its units on the host (a known problem of cgroup v2; NVML then returns
    Unknown Error). EACCES: the user has no permission on the file. If /dev/nvidia-uvm is missing, cuInit
    fails with 999; nvidia-modprobe creates it.
    """
    if context.simulated:
        raise NotCheckable("the GPU is simulated")
    require_driver(context)
    nodes = context.driver.device_nodes
    evidence = {node.path: node.error or f"can be opened ({node.mode})" for node in nodes} or {
        "/dev/nvidia*": "not found"
    }
    if context.host.is_wsl or context.host.is_jetson:
        refused = [node for node in nodes if node.error]
        if refused:
            summary = f"{refused[0].path} cannot be opened ({refused[0].error})"
            yield fail(summary, evidence, "sudo usermod -aG video,render $USER, then log in again")
        yield ok("the device nodes can be opened", evidence)
        return
    problems = [*_node_problems(context, evidence)]
    if context.cuda_devices and problems:
        yield ok("the device nodes work, because CUDA does", evidence)
        return
    yield from problems
    yield ok(f"{count_of(len(nodes), 'device node')} can be opened", evidence)


def _node_problems(context: RunContext, evidence: dict[str, str]) -> Iterator[Finding]:
    paths = {node.path for node in context.driver.device_nodes}
    if _CONTROL_NODE not in paths or not any(map(_GPU_NODE.fullmatch, paths)):
        missing = _CONTROL_NODE if _CONTROL_NODE not in paths else "/dev/nvidia0"
        if context.host.container:
            summary = f"the container was started without a GPU: {missing} does not exist"
            yield fail(summary, evidence, _CONTAINER_FIX)
        else:
            fixes = ("sudo nvidia-modprobe -c 0 -u", "or: sudo nvidia-smi")
            yield fail(f"{missing} does not exist", evidence, *fixes)
    elif _UVM_NODE not in paths:
        fix = _CONTAINER_FIX if context.host.container else "sudo nvidia-modprobe -u -c 0"
        yield fail(f"{_UVM_NODE} does not exist, so CUDA cannot start (999)", evidence, fix)
    for node in context.driver.device_nodes:
        if not node.error or not (
            _GPU_NODE.fullmatch(node.path) or node.path in (_CONTROL_NODE, _UVM_NODE)
        ):
            continue
        evidence = {node.path: f"{node.error} ({node.mode})"}
        if node.error == "EPERM" and context.host.container:
            yield fail(
                "the container has no permission to use the GPU (EPERM)",
                evidence,
                "restart the container",
                "permanently, on the host: nvidia-ctk system create-dev-char-symlinks --create-all, "
                "or start containers with CDI (--device nvidia.com/gpu=all)",
            )
        elif node.error in ("EACCES", "EPERM"):
            yield fail(
                f"no permission to open {node.path} ({node.error})",
                evidence,
                f"join the group of the file (ls -l {node.path}): sudo usermod -aG video $USER",
            )
        else:
            yield fail(
                f"{node.path} cannot be opened ({node.error}): the driver cannot access the device",
                evidence,
                _LOG_COMMAND,
            )


def gpus_on_bus(context: RunContext) -> Finding:
    """NVML should report every NVIDIA GPU that is on the PCI bus.

    The registers of a GPU that has fallen off the bus read as all ones (revision ff in lspci), and the
    kernel log usually has an Xid 79; causes are power, heat or a loose card. A GPU that the driver could
    not initialize is on the bus but not in NVML. A container sees the bus of its host, but only its own
    GPUs in NVML.
    """
    require_driver(context)
    bus_gpus = [gpu for gpu in context.driver.pci_gpus if gpu.driver not in _PASS_THROUGH_DRIVERS]
    failed_addresses = [gpu.address for gpu in bus_gpus if gpu.is_gone]
    if failed_addresses:
        return fail(
            f"a GPU has fallen off the bus: {', '.join(failed_addresses)}",
            {"revision": "0xff"},
            "reboot; if it returns, check power, cooling and the PCIe slot (CK033 shows Xid errors)",
        )
    gpus = [device for device in require_nvml(context).devices if device.parent is None]
    lost = {
        f"GPU {gpu.index}": gpu.uuid.reason for gpu in gpus if isinstance(gpu.uuid, Unavailable)
    }
    if lost:
        return fail(f"NVML cannot access {', '.join(lost)}", lost, _LOG_COMMAND)
    if not bus_gpus and gpus:
        raise NotCheckable("the PCI bus cannot be read here")
    if not bus_gpus:
        return fail("NVML answers but reports no GPU", {}, _LOG_COMMAND)
    nvml_addresses = {
        _without_leading_zeros(gpu.pci_bus_id) for gpu in gpus if isinstance(gpu.pci_bus_id, str)
    }
    missing = {
        gpu.address: gpu.driver or "no driver"
        for gpu in bus_gpus
        if _without_leading_zeros(gpu.address) not in nvml_addresses
    }
    if not missing:
        return ok(f"NVML reports every GPU on the PCI bus ({len(bus_gpus)})")
    if context.host.container and gpus:
        return ok(f"this container has {len(gpus)} of the host's {len(bus_gpus)} GPUs", missing)
    make_finding = warn if gpus else fail
    summary = f"the driver did not initialize {len(missing)} of {len(bus_gpus)} GPUs"
    return make_finding(summary, missing, _LOG_COMMAND)


def _without_leading_zeros(address: str) -> str:
    # The PCI domain has 4 or 8 digits, depending on the source of the address.
    domain, _, suffix = address.lower().partition(":")
    return f"{int(domain, 16):x}:{suffix}"
