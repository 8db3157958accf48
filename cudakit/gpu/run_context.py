"""Gather a RunContext. No other package reads /proc, /dev, /sys and /etc for facts of a run."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.resources import files as package_files
from pathlib import Path

from cudakit.gpu.api.facts import (
    Build,
    CudaView,
    DeviceFacts,
    Distribution,
    Library,
    Machine,
    NvmlView,
    RunContext,
    SelfTestStep,
    Software,
    Toolkit,
)
from cudakit.gpu.host import (
    SYSTEM,
    Files,
    attempt,
    is_privileged,
    process_names,
    read_driver,
    read_host,
    read_limits,
)
from cudakit.units import Unavailable

_NOT_IN_NVML = Unavailable("NVML does not report the device")
_SIMULATED = Unavailable("the machine is simulated")


def gather(
    machine: Machine,
    *,
    variables: Mapping[str, str],
    command: tuple[str, ...] = (),
    ordinal: int = 0,
    files: Files = SYSTEM,
) -> RunContext:
    """Return the facts that benchmark results record: host, driver, environment, processes on the GPU.

    ``ordinal`` is the CUDA index of the GPU.

    Call this before the device is opened: otherwise ``other_processes`` counts this process, and the child
    process that queries the driver.
    """
    context = _common_facts(machine, variables, files)
    uuids = [device.uuid for device in context.cuda_devices[ordinal : ordinal + 1]]
    device = next(
        (candidate for candidate in context.nvml_devices if candidate.uuid in uuids), None
    )
    return replace(
        context,
        command=command,
        versions=dict(_versions(context.nvml, context.cuda)),
        nvml_device=device,
        other_processes=_count_processes(machine, device),
    )


def gather_all(
    machine: Machine,
    *,
    variables: Mapping[str, str],
    search_path: Iterable[str],
    self_test: tuple[SelfTestStep, ...] | Unavailable = (),
    files: Files = SYSTEM,
) -> RunContext:
    """Return all facts that can be observed without using a GPU.

    A fact that cannot be read becomes Unavailable with the reason. ``search_path`` is the list of
    directories with Python packages, such as sys.path. If the GPUs are simulated, the files, packages,
    environment variables and limits of the host are left out: they belong to a different machine.
    """
    if machine.simulated:
        files, variables, search_path = Files(None), {}, ()
    context = _common_facts(machine, variables, files)
    if machine.simulated:
        context = replace(
            context, host=replace(context.host, is_wsl=_uses_wsl_driver(context.cuda))
        )
    return replace(
        context,
        driver=read_driver(files, context.variables, context.host.kernel),
        software=read_software(files, context.variables, search_path),
        limits=_SIMULATED if machine.simulated else attempt(read_limits),
        privileged=is_privileged(files),
        processes=attempt(partial(process_names, files)),
        telemetry=tuple(
            attempt(partial(machine.telemetry, device)) for device in context.nvml_devices
        ),
        self_test=self_test,
    )


def _common_facts(machine: Machine, variables: Mapping[str, str], files: Files) -> RunContext:
    """Return the facts for ``gather`` and ``gather_all``: host, environment, views of NVML and CUDA."""
    nvml, cuda = attempt(machine.nvml), attempt(machine.cuda)
    return RunContext(
        simulated=machine.simulated,
        variables=_effective_variables(machine, cuda, variables),
        host=read_host(files, variables),
        nvml=nvml,
        cuda=cuda,
    )


def _uses_wsl_driver(cuda: CudaView | Unavailable) -> bool:
    """Return whether libcuda is the one that Windows provides in WSL."""
    library = cuda if isinstance(cuda, Unavailable) else cuda.libcuda
    return isinstance(library, str) and library.startswith("/usr/lib/wsl/")


def _effective_variables(
    machine: Machine, cuda: CudaView | Unavailable, variables: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the environment variables.

    On a simulated machine, the variables that select CUDA devices are simulated.
    """
    if not machine.simulated or isinstance(cuda, Unavailable):
        return variables
    recorded_variables = {
        "CUDA_VISIBLE_DEVICES": cuda.visible_devices,
        "CUDA_DEVICE_ORDER": cuda.device_order,
    }
    other_variables = {
        name: value for name, value in variables.items() if name not in recorded_variables
    }
    return other_variables | {
        name: value for name, value in recorded_variables.items() if value is not None
    }


def _versions(
    nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable
) -> Iterator[tuple[str, str]]:
    from importlib.metadata import version  # slow to import (20 ms), and not needed by doctor

    if isinstance(nvml, NvmlView) and isinstance(nvml.driver_version, str):
        yield "driver", nvml.driver_version
    if isinstance(cuda, CudaView) and isinstance(cuda.driver_version, tuple):
        yield "CUDA", ".".join(map(str, cuda.driver_version))
    yield "cudakit", version("cudakit")
    yield "python", platform.python_version()


def _count_processes(machine: Machine, device: DeviceFacts | None) -> int | Unavailable:
    if machine.simulated:
        return _SIMULATED
    processes = _NOT_IN_NVML if device is None else machine.processes(device)
    return processes if isinstance(processes, Unavailable) else len(processes)


# --- Installed Python packages, CUDA libraries and toolkits ----------------------------------------
#
# No package is imported: the names of metadata directories and one line of a version file are enough
# (https://packaging.python.org, Recording installed projects). Libraries are listed in the order in which
# the dynamic loader searches (man 8 ld.so).

# Matches in torch/version.py: ``cuda: Optional[str] = '13.0'`` or ``cuda = None``.
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:'([\d.]+)'|\"([\d.]+)\"|None)", re.MULTILINE)
# Matches cupy-cuda13x and jax-cuda13-plugin.
_PACKAGE_CUDA = re.compile(r"(?:cupy-cuda(\d\d)x?|jax-cuda(\d\d)-plugin)")
# The directories that the dynamic loader searches last; names with an architecture are Debian's.
_SYSTEM_DIRECTORIES = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
# Matches the names that programs load, such as libcudnn.so.9, but not libcudnn.so or libcudnn.so.9.19.0.
_SONAME = re.compile(
    r"lib(cuda|nvidia-ml|cudart|cublas|cublasLt|cudnn|nccl|nvrtc|cupti|nvJitLink"
    r"|cusparse|cusolver|cufft|curand)\.so\.\d+(\.\d)?"
)


def read_software(
    files: Files, variables: Mapping[str, str], search_path: Iterable[str]
) -> Software:
    """Read packages, builds, libraries and toolkits; a list that cannot be read is Unavailable."""
    distributions = attempt(lambda: tuple(installed_packages(search_path)))
    packages = () if isinstance(distributions, Unavailable) else distributions
    return Software(
        distributions=distributions,
        builds=attempt(lambda: tuple(framework_builds(packages))),
        libraries=attempt(lambda: tuple(libraries(files, variables, packages))),
        toolkits=tuple(toolkits(files)),
        nccl_conf=_nccl_conf(files),
        missing_extensions=tuple(_missing_extensions()),
    )


# --- packages --------------------------------------------------------------------------------------


def installed_packages(search_path: Iterable[str]) -> Iterator[Distribution]:
    """Yield the packages on a search path such as sys.path, in its order."""
    for directory in dict.fromkeys(os.path.abspath(path) for path in search_path):
        try:
            entry_names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in entry_names:
            stem, dot, suffix = name.rpartition(".")
            if dot and suffix in ("dist-info", "egg-info"):
                package, _, version_part = stem.partition("-")
                version = version_part.partition("-py")[0] or _metadata_version(directory, name)
                yield Distribution(_normalized_name(package), version, directory)


def _metadata_version(directory: str, name: str) -> str:
    """Read the version from PKG-INFO, because the directory name of a source tree does not contain it."""
    with suppress(OSError):
        for line in Path(directory, name, "PKG-INFO").read_text(encoding="utf-8").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return ""


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def framework_builds(distributions: Iterable[Distribution]) -> Iterator[Build]:
    """Yield the CUDA versions that torch, CuPy and JAX were built for."""
    for distribution in distributions:
        name, version = distribution.name, distribution.version
        match = _PACKAGE_CUDA.fullmatch(name)
        if name == "torch":
            yield Build("torch", version, _torch_cuda(distribution))
        elif match:
            yield Build(name, version, (int(match[1] or match[2]), None))


def _torch_cuda(distribution: Distribution) -> tuple[int, int | None] | None:
    try:
        text = Path(distribution.directory, "torch", "version.py").read_text(encoding="utf-8")
    except OSError:
        return _local_version(distribution.version)
    match = _TORCH_CUDA.search(text)
    if not match or not match.lastindex:
        return None
    major, _, minor = (match[1] or match[2]).partition(".")
    return int(major), int(minor.partition(".")[0]) if minor else None


def _local_version(version: str) -> tuple[int, int | None] | None:
    """Return the CUDA version of a local version such as 2.11.0+cu130."""
    match = re.search(r"\+cu(\d+)(\d)$", version)
    return (int(match[1]), int(match[2])) if match else None


# --- libraries and toolkits ------------------------------------------------------------------------


def libraries(
    files: Files, variables: Mapping[str, str], distributions: Iterable[Distribution]
) -> Iterator[Library]:
    """Yield the installed copies of the driver's and CUDA's libraries, in the search order of the loader."""
    wheels = {
        distribution.directory
        for distribution in distributions
        if distribution.name.startswith("nvidia-")
    }
    for source, directories in (
        ("LD_LIBRARY_PATH", ld_library_path(variables)),
        ("package", _wheel_directories(files, sorted(wheels))),
        ("system", (*_ld_so_conf_directories(files), *_SYSTEM_DIRECTORIES)),
        ("toolkit", _toolkit_libraries(files, variables)),
    ):
        for directory in dict.fromkeys(directories):
            for name in files.names(directory):
                if _SONAME.fullmatch(name):
                    path = f"{directory}/{name}"
                    yield Library(name, path, files.resolve(path), source)


def ld_library_path(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the absolute directories of LD_LIBRARY_PATH."""
    directories = re.split("[:;]", variables.get("LD_LIBRARY_PATH", ""))
    return tuple(os.path.normpath(path) for path in directories if path.startswith("/"))


def _wheel_directories(files: Files, directories: Iterable[str]) -> Iterator[str]:
    for directory in directories:
        for package in files.names(f"{directory}/nvidia"):
            yield f"{directory}/nvidia/{package}/lib"


def _ld_so_conf_directories(files: Files) -> Iterator[str]:
    """List the directories of /etc/ld.so.conf.d, which precede the default directories."""
    for name in files.names("/etc/ld.so.conf.d"):
        for line in files.lines(f"/etc/ld.so.conf.d/{name}"):
            directory = line.partition("#")[0].strip()
            if directory.startswith("/"):
                yield os.path.normpath(directory)


def _toolkit_libraries(files: Files, variables: Mapping[str, str]) -> Iterator[str]:
    roots = (variables.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX"))
    for root in (*filter(None, roots), *toolkit_directories(files)):
        yield f"{root}/lib64"
        yield f"{root}/lib"


def toolkit_directories(files: Files) -> tuple[str, ...]:
    """Return the CUDA toolkits under /usr/local, with links resolved."""
    paths = (f"/usr/local/{name}" for name in files.names("/usr/local") if name.startswith("cuda"))
    return tuple(dict.fromkeys(files.resolve(path) for path in paths))


def toolkits(files: Files) -> Iterator[Toolkit]:
    """Yield the toolkits whose version.json contains the version of CUDA."""
    for directory in toolkit_directories(files):
        with suppress(ValueError, KeyError, TypeError):
            version_document = json.loads(files.text(f"{directory}/version.json") or "")
            match = re.match(r"(\d+)\.(\d+)", version_document["cuda"]["version"])
            if match:
                yield Toolkit(directory, (int(match[1]), int(match[2])))


def _nccl_conf(files: Files) -> dict[str, str]:
    """Read the variables of /etc/nccl.conf, which has lines of the form NAME=value."""
    lines = (line for line in files.lines("/etc/nccl.conf") if not line.lstrip().startswith("#"))
    variable_lines = (line.partition("=") for line in lines)
    return {name.strip(): value.strip() for name, equals, value in variable_lines if equals}


# --- cudakit itself --------------------------------------------------------------------------------

# The extension modules that setup.py builds.
_EXTENSIONS = (
    "memory/load/_pickled",
    "allocator/_fast",
    "arrays/plugs/_buffers",
    "arrays/plugs/_torch_pool",
    "record/_frames",
    "record/_recorder",
)


def _missing_extensions() -> Iterator[str]:
    """Yield the C extensions of cudakit that are not installed, without importing any."""
    package = package_files("cudakit")
    for name in _EXTENSIONS:
        if not any(package.joinpath(f"{name}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
            yield name
