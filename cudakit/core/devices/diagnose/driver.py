"""Checks of the driver (CK001, CK003, CK004, CK008), and the versions of its three parts."""

from __future__ import annotations

import re

from cudakit.core.devices.diagnose.check import (
    Finding,
    NotCheckable,
    Status,
    fail,
    ok,
    require,
    warn,
)
from cudakit.gpu.api.facts import NvmlView
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_IN_NAME = re.compile(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)$")
_GUIDE = "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/"
_INSTALL = {
    "ubuntu": "sudo ubuntu-drivers install",
    "debian": "sudo apt install nvidia-driver",
    "arch": "sudo pacman -S nvidia-open",
}


def driver_loaded(c: RunContext) -> Finding:
    """The kernel needs NVIDIA's module before anything else can work.

    Seen in /proc/driver/nvidia/version, which containers share with their host. In a sandbox that
    hides it, an answer of NVML or CUDA proves the driver as well. Without the module the check says
    which cause is likely: no GPU on the PCI bus, nouveau in its place, a module that was not built for
    this kernel, or one that Secure Boot refuses because it is not signed.
    """
    module = c.driver.module
    if module:
        kind = "open" if module.is_open else "proprietary"
        return ok(f"driver {module.version} is loaded ({kind} kernel module)")
    version = answering_driver(c)
    if version:
        return ok(f"driver {version} answers, though /proc/driver/nvidia does not show it")
    if c.host.is_wsl:
        return _without_wsl_driver(c)
    return _not_loaded(c)


def answering_driver(c: RunContext) -> str | None:
    """Return the version of a driver that NVML or CUDA reaches, None if neither does."""
    if not isinstance(c.nvml, Unavailable):
        version = c.nvml.driver_version
        return "of unknown version" if isinstance(version, Unavailable) else version
    if not isinstance(c.cuda, Unavailable) and c.cuda.error is None:
        return "of unknown version"
    return None


def require_nvml(c: RunContext) -> NvmlView:
    """Return NVML's view. Raises NotCheckable without it: CK003 has reported that."""
    return require(c.nvml, "NVML does not answer (CK003)")


def require_driver(c: RunContext) -> None:
    """Raise NotCheckable without a driver: CK001 has reported that."""
    if driver_loaded(c).status is Status.FAIL:
        raise NotCheckable("the driver is not loaded (CK001)")


def _not_loaded(c: RunContext) -> Finding:
    gpus = c.driver.pci_gpus
    evidence = {"/proc/driver/nvidia/version": "absent"}
    if gpus:
        evidence["PCI bus"] = ", ".join(
            f"{one.address} ({one.driver or 'no driver'})" for one in gpus
        )
    if any(one.driver == "nouveau" for one in gpus) or c.driver.nouveau_loaded:
        return fail(
            "nouveau drives the GPU, and CUDA cannot use it",
            evidence,
            *_install(c.host.distribution_id),
            "then keep nouveau off: echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/nouveau.conf, "
            "update the initramfs and reboot",
        )
    if gpus:
        return _module_missing(c, evidence)
    evidence["PCI bus"] = "no NVIDIA GPU"
    return fail(
        "this machine shows no NVIDIA GPU and no driver",
        evidence,
        "use a machine with a GPU, or pass the GPU through to this virtual machine",
        "cudakit doctor --gpu sim shows the report on a simulated one",
    )


def _module_missing(c: RunContext, evidence: dict[str, str]) -> Finding:
    release = c.host.kernel or "?"
    evidence["kernel"] = release
    if c.host.container:
        return fail(
            "the host has not loaded its NVIDIA driver",
            evidence,
            "load or install the driver on the host; nothing in a container can",
        )
    if not c.driver.module_installed:
        return fail(
            f"there is a GPU, but no NVIDIA module for kernel {release}",
            evidence,
            *_install(c.host.distribution_id),
            "after an update of the kernel: sudo dkms autoinstall, or boot the kernel before it",
        )
    signed: tuple[str, ...] = ()
    if c.host.secure_boot:
        evidence["Secure Boot"] = "on: a module must be signed with an enrolled key"
        signed = (
            "enrol the key that signs the module (mokutil --import), or turn Secure Boot off",
        )
    return fail(
        "the NVIDIA module is installed but not loaded",
        evidence,
        "sudo modprobe nvidia && sudo dmesg | grep -i nvrm | tail",
        *signed,
    )


def _without_wsl_driver(c: RunContext) -> Finding:
    found = {
        "/dev/dxg": any(node.path == "/dev/dxg" for node in c.driver.device_nodes),
        "/usr/lib/wsl/lib/libcuda.so.1": c.driver.wsl_libcuda,
    }
    return fail(
        "the driver of Windows does not answer in WSL",
        {path: "present" if there else "absent" for path, there in found.items()},
        "install the NVIDIA driver in Windows (never one in WSL), then in PowerShell: "
        "wsl --update; wsl --shutdown",
    )


def _install(distribution_id: str) -> tuple[str, ...]:
    """Return how to install the driver on a Linux distribution."""
    command = _INSTALL.get(distribution_id)
    return (command, f"or follow {_GUIDE}") if command else (f"install the driver: {_GUIDE}",)


def nvml_answers(c: RunContext) -> Finding:
    """NVML, the driver's management library, is what nvidia-smi and every monitor ask.

    CUDA works without it, but then nothing can be said of the health of a GPU. Its usual troubles:
    libnvidia-ml is not in a container that was started without the capability "utility"; it is of
    another version than the kernel's module (CK004); or the container has lost its device nodes, and
    NVML says Unknown Error (CK002).
    """
    if not isinstance(c.nvml, Unavailable):
        count = sum(device.parent is None for device in c.nvml.devices)
        version = c.nvml.nvml_version
        shown = "" if isinstance(version, Unavailable) else f" {version}"
        return ok(f"NVML{shown} answers and sees {count} GPU{'' if count == 1 else 's'}")
    require_driver(c)
    reason = c.nvml.reason
    if c.host.is_jetson:
        return ok("NVML does not answer, as on a Jetson without it", {"NVML": reason})
    return fail(f"NVML does not answer: {reason}", {}, *_nvml_fixes(c, reason.lower()))


def _nvml_fixes(c: RunContext, reason: str) -> tuple[str, ...]:
    where = c.host.container
    if "different versions" in reason:
        return ("see CK004: the kernel's module and the libraries are of different versions",)
    if "unknown error" in reason and where:
        return ("see CK002: restart the container, which has lost its device nodes",)
    if where:
        return ("start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility",)
    return ("install the driver's libraries of the kernel module's version (nvidia-utils)",)


def versions_agree(c: RunContext) -> Finding:
    """The kernel's module, libnvidia-ml and libcuda must be of one driver release.

    After an update the new libraries lie on disk while the old module still runs: NVML then says
    "Driver/library version mismatch", and cuInit fails with 803. A container gets its libraries when it
    is started, and keeps the old ones. A libcuda from cuda-compat is another version on purpose: CK008
    judges it.
    """
    module = c.driver.module
    versions = {
        "kernel module": module.version if module else None,
        "libnvidia-ml": nvml_library_version(c),
        "libcuda": None if _is_compat(c) else libcuda_version(c),
    }
    known = {part: version for part, version in versions.items() if version}
    if len(known) < 2:
        require_driver(c)
        raise NotCheckable("fewer than two of the driver's parts tell their version")
    if len(set(known.values())) == 1:
        parts = list(known)
        return ok(f"{', '.join(parts[:-1])} and {parts[-1]} are all {known[parts[0]]}", known)
    return fail(
        "the driver's parts are of different versions: "
        + ", ".join(f"{part} {version}" for part, version in known.items()),
        known,
        "reboot, or end what uses the GPU and reload: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset "
        "nvidia && sudo modprobe nvidia",
        "restart containers that were started before the update",
    )


def _is_compat(c: RunContext) -> bool:
    return "compat" in (libcuda_path(c) or "")


def libcuda_origin(c: RunContext) -> Finding:
    """The libcuda that programs get should be the driver's own, unless cuda-compat is wanted and supported.

    libcuda comes with the driver. Two others can take its place: the stub of the CUDA toolkit, which
    exists to link programs and fails with 34, and that of the package cuda-compat, which brings a newer
    CUDA to an older driver. cuda-compat runs on data-centre GPUs only (else 804), and only while it is
    newer than the driver: an older one, as old container images carry it, hides the newer CUDA of the
    driver or fails with 803. CUDA Compatibility, section Forward Compatibility.
    """
    path = libcuda_path(c)
    if path is None:
        require_driver(c)
        raise NotCheckable("no libcuda was found (CK005)")
    evidence = {"libcuda": path, **_other_copies(c, path)}
    if "/stubs/" in path:
        return fail(
            "the stub of libcuda is loaded, which cannot run anything",
            evidence,
            _remove_from_path("stubs"),
        )
    if "compat" in path:
        return _check_compat(c, path, evidence)
    return ok(f"libcuda is the driver's: {path}", evidence)


def _check_compat(c: RunContext, path: str, evidence: dict[str, str]) -> Finding:
    own, module = libcuda_version(c), c.driver.module
    evidence |= {"kernel module": module.version if module else "?"}
    code = c.cuda_error
    if code in (803, 804):
        why = "this GPU does not support" if code == 804 else "this driver does not fit"
        return fail(
            f"libcuda is cuda-compat's, which {why} ({code})", evidence, _remove_from_path("compat")
        )
    if own and module and as_numbers(own) < as_numbers(module.version):
        return warn(
            f"cuda-compat's libcuda {own} is older than the driver {module.version}, and hides its CUDA",
            evidence,
            _remove_from_path("compat"),
        )
    return ok(f"libcuda is cuda-compat's, for forward compatibility: {path}", evidence)


def _remove_from_path(mark: str) -> str:
    return (
        f"take the directory named {mark} off LD_LIBRARY_PATH (or /etc/ld.so.conf.d), "
        "or uninstall its package"
    )


def _other_copies(c: RunContext, path: str) -> dict[str, str]:
    if isinstance(c.software.libraries, Unavailable):
        return {}
    copies = [
        one for one in c.software.libraries if one.soname == "libcuda.so.1" and one.real != path
    ]
    paths = dict.fromkeys(one.real for one in copies)
    return {"other copies": ", ".join(paths)} if paths else {}


# --- versions of the driver's parts ----------------------------------------------------------------


def nvml_library_version(c: RunContext) -> str | None:
    """Return the driver version of libnvidia-ml; NVML puts its own version before it."""
    nvml = c.nvml
    if not isinstance(nvml, Unavailable) and isinstance(nvml.nvml_version, str):
        return nvml.nvml_version.partition(".")[2] or None
    path = _first_copy(c, "libnvidia-ml.so.1")
    return version_in_name(path) if path else None


def libcuda_path(c: RunContext) -> str | None:
    """Return the path of the libcuda that answered, else of the one that the loader would load."""
    cuda = c.cuda
    if not isinstance(cuda, Unavailable) and isinstance(cuda.libcuda, str):
        return cuda.libcuda
    return _first_copy(c, "libcuda.so.1")


def libcuda_version(c: RunContext) -> str | None:
    """Return the driver version of libcuda, from the name of its file."""
    path = libcuda_path(c)
    return version_in_name(path) if path else None


def version_in_name(path: str) -> str | None:
    """Return 580.65.06 for libcuda.so.580.65.06, None for libcuda.so.1."""
    found = _IN_NAME.search(path)
    return found[1] if found else None


def _first_copy(c: RunContext, soname: str) -> str | None:
    """Return the copy of a library that the loader would load."""
    found = () if isinstance(c.software.libraries, Unavailable) else c.software.libraries
    return next((one.real for one in found if one.soname == soname), None)


def driver_cuda(c: RunContext) -> tuple[int, int] | None:
    """Return the version of CUDA that the driver supports, None if it is unknown."""
    version = None if isinstance(c.cuda, Unavailable) else c.cuda.driver_version
    return version if isinstance(version, tuple) else None


def as_numbers(version: str) -> tuple[int, ...]:
    """Convert a version to numbers that compare: 580.65.06 to (580, 65, 6)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def cuda_text(version: tuple[int, int | None]) -> str:
    """Format a version of CUDA: 13.0, or 13.x if the minor number is unknown."""
    major, minor = version
    return f"{major}.{'x' if minor is None else minor}"
