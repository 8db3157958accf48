"""Checks that packages and libraries suit the driver, the GPUs and each other (CK009 to CK013)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cudakit.devices.doctor.check import (
    Finding,
    NotCheckable,
    combine_findings,
    fail_finding,
    ok_finding,
    require_fact,
    warn_finding,
)
from cudakit.devices.doctor.driver import cuda_text, driver_cuda, require_driver
from cudakit.gpu.api.facts import Build, Distribution, Library, RunContext

# The oldest driver for each major version of CUDA (CUDA Compatibility, table of minor version compatibility).
_MIN_DRIVERS = {11: "450", 12: "525", 13: "580"}
# pip indexes of the PyTorch builds that run on every driver of a CUDA major version.
_TORCH_INDEXES = {
    12: "https://download.pytorch.org/whl/cu126",
    13: "https://download.pytorch.org/whl/cu130",
}
# Packages that generate PTX. The driver may be unable to compile PTX of a newer minor version.
_PTX_COMPILERS = re.compile(r"nvidia-cuda-nvrtc(-cu\d\d)?|nvidia-nvjitlink(-cu\d\d)?|cuda-toolkit")
_BINDING_PACKAGES = ("cuda-bindings", "cuda-python")

# Packages that install the same module. Python imports the module of the package that was installed last.
_PACKAGES_OF_MODULES = {
    "pynvml": ("nvidia-ml-py", "nvidia-ml-py3", "pynvml"),
    "cupy": ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "faiss": ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12"),
}

_Capability = tuple[int, int]

# The first CUDA version whose compilers support a compute capability (release notes of the CUDA Toolkit).
_FIRST_CUDA_BY_CAPABILITY: dict[_Capability, _Capability] = {
    (7, 0): (9, 0),
    (7, 2): (9, 2),
    (7, 5): (10, 0),
    (8, 0): (11, 0),
    (8, 6): (11, 1),
    (8, 7): (11, 4),
    (8, 9): (11, 8),
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (10, 1): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}
# The lowest compute capability that each major version of CUDA supports. CUDA 12 dropped Kepler; CUDA 13
# dropped Maxwell, Pascal and Volta.
_MIN_CAPABILITIES: dict[int, _Capability] = {11: (3, 5), 12: (5, 0), 13: (7, 5)}
# The lowest compute capability that cudakit is tested on.
_MIN_TESTED_CAPABILITY: _Capability = (7, 5)


def distributions(context: RunContext) -> dict[str, Distribution]:
    """Return the installed packages by name. Of several copies, return the first one on sys.path."""
    return {
        distribution.name: distribution
        for distribution in reversed(require_fact(context.software.distributions))
    }


def driver_version(context: RunContext) -> Finding:
    """The driver must support the CUDA version that packages were built for.

    A driver runs programs of its own CUDA version and of older ones. It also runs newer minor versions of
    the same major version (minor version compatibility), except PTX of a newer NVRTC, nvcc or nvJitLink,
    which fails with 222 (CUDA_ERROR_UNSUPPORTED_PTX_VERSION). CUDA 11 needs driver 450 or newer, CUDA 12
    needs 525, CUDA 13 needs 580.
    """
    supported_cuda = driver_cuda(context)
    if supported_cuda is None:
        require_driver(context)
        raise NotCheckable("the CUDA version of the driver is unknown (CK005)")
    requirements = list(_requirements(context))
    evidence = {"driver": f"CUDA {cuda_text(supported_cuda)}"}
    evidence |= {
        requirement.name: f"CUDA {cuda_text(requirement.cuda)}" for requirement in requirements
    }
    is_newer_minor = any(
        (requirement.cuda[1] or 0) > supported_cuda[1]
        for requirement in requirements
        if requirement.cuda[0] == supported_cuda[0]
    )
    reason = (
        f": minor versions of CUDA {supported_cuda[0]} are compatible" if is_newer_minor else ""
    )
    summary_if_ok = (
        f"the driver's CUDA {cuda_text(supported_cuda)} is new enough for the installed packages{reason}"
        if requirements
        else f"the driver supports CUDA {cuda_text(supported_cuda)}; no installed package needs CUDA"
    )
    return combine_findings(
        (_check_requirement(requirement, supported_cuda, evidence) for requirement in requirements),
        otherwise=ok_finding(summary_if_ok, evidence),
    )


@dataclass(frozen=True, slots=True)
class _CudaRequirement:
    """The CUDA version that a package or toolkit needs from the driver."""

    name: str
    cuda: tuple[int, int | None]
    generates_ptx: bool = False
    is_used: bool = True  # False if the package may be installed but unused: bindings and toolkits


def _requirements(context: RunContext) -> Iterator[_CudaRequirement]:
    for build in require_fact(context.software.builds):
        if build.cuda:
            yield _CudaRequirement(f"{build.framework} {build.version}", build.cuda)
    for name, package in distributions(context).items():
        if _PTX_COMPILERS.fullmatch(name) or name in _BINDING_PACKAGES:
            version = _major_minor(package.version)
            if version:
                is_compiler = name not in _BINDING_PACKAGES
                yield _CudaRequirement(
                    f"{name} {package.version}", version, is_compiler, is_used=is_compiler
                )
    for toolkit in context.software.toolkits:
        yield _CudaRequirement(
            f"toolkit {toolkit.path}", toolkit.cuda, generates_ptx=True, is_used=False
        )


def _major_minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _check_requirement(
    requirement: _CudaRequirement, supported_cuda: tuple[int, int], evidence: dict[str, str]
) -> Finding:
    major, minor = requirement.cuda
    if major > supported_cuda[0]:
        oldest_driver = _MIN_DRIVERS.get(major)
        make_finding = fail_finding if requirement.is_used else warn_finding
        return make_finding(
            f"{requirement.name} needs CUDA {cuda_text(requirement.cuda)}, "
            f"but the driver supports {cuda_text(supported_cuda)}",
            evidence,
            f"update the driver to {oldest_driver} or newer"
            if oldest_driver
            else "update the driver",
            f"or install a build for CUDA {supported_cuda[0]}",
        )
    if (
        requirement.generates_ptx
        and minor is not None
        and major == supported_cuda[0]
        and minor > supported_cuda[1]
    ):
        return warn_finding(
            f"PTX from {requirement.name} is too new for the driver's CUDA "
            f"{cuda_text(supported_cuda)} (error 222)",
            evidence,
            "update the driver, or compile to machine code (-arch=sm_XX) instead of PTX",
        )
    return ok_finding(requirement.name)


# --- CK010: compute capabilities ---------------------------------------------------------------------


def architectures(context: RunContext) -> Finding:
    """A framework must contain code for the GPU's compute capability, or PTX that the driver can compile.

    A build for CUDA 12.4 has no code for Blackwell, which CUDA 12.8 added, and a build for CUDA 13 has
    none for Volta and older: kernels then fail with 209 ("no kernel image is available"). The check
    compares the CUDA version of each build with the GPU; a build can leave out more architectures, which
    torch.cuda.get_arch_list() lists.
    """
    capability_by_name = _capabilities(context)
    gpu_names_text = ", ".join(
        f"{name} ({_capability_text(capability)})"
        for name, capability in capability_by_name.items()
    )
    evidence = {
        name: f"compute capability {_capability_text(capability)}"
        for name, capability in capability_by_name.items()
    }
    has_cuda_build = any(build.cuda for build in require_fact(context.software.builds))
    summary_if_ok = (
        f"the installed builds support {gpu_names_text}"
        if has_cuda_build
        else f"cudakit supports {gpu_names_text}; no framework built for CUDA is installed"
    )
    return combine_findings(
        (
            *_unsupported_gpus(capability_by_name, evidence),
            *_builds_without_code(context, capability_by_name, evidence),
        ),
        otherwise=ok_finding(summary_if_ok, evidence),
    )


def _capabilities(context: RunContext) -> dict[str, _Capability]:
    """Return the compute capability of each kind of GPU."""
    capability_by_name = {}
    for device in context.cuda_devices or context.nvml_devices:
        name, capability = device.fields.get("name"), device.fields.get("compute_capability")
        if isinstance(name, str) and isinstance(capability, str):
            major, _, minor = capability.partition(".")
            capability_by_name[name] = (int(major), int(minor))
    if not capability_by_name:
        raise NotCheckable("the compute capability of the GPUs is unknown (CK003, CK005)")
    return capability_by_name


def _unsupported_gpus(
    capability_by_name: dict[str, _Capability], evidence: dict[str, str]
) -> Iterator[Finding]:
    for name, capability in capability_by_name.items():
        if capability < _MIN_TESTED_CAPABILITY:
            yield fail_finding(
                f"{name} has compute capability {_capability_text(capability)}; "
                f"cudakit needs {_capability_text(_MIN_TESTED_CAPABILITY)}",
                evidence,
                "use a Turing or newer GPU",
            )


def _builds_without_code(
    context: RunContext, capability_by_name: dict[str, _Capability], evidence: dict[str, str]
) -> Iterator[Finding]:
    for build in require_fact(context.software.builds):
        for name, capability in capability_by_name.items():
            reason = _reason_without_code(build.cuda, capability) if build.cuda else ""
            if reason:
                yield fail_finding(
                    f"{build.framework} {build.version} has no code for {name} "
                    f"(sm_{capability[0]}{capability[1]}): {reason}",
                    {
                        **evidence,
                        build.framework: f"CUDA {cuda_text(build.cuda or (0, 0))}",
                    },
                    _build_with_code(capability),
                )


def _reason_without_code(cuda: tuple[int, int | None], capability: _Capability) -> str:
    first_cuda = _FIRST_CUDA_BY_CAPABILITY.get(capability)
    # If the minor version is unknown, the newest one is assumed.
    newest_cuda = (cuda[0], 99 if cuda[1] is None else cuda[1])
    if first_cuda and newest_cuda < first_cuda:
        return f"support starts with CUDA {cuda_text(first_cuda)}"
    if capability < _MIN_CAPABILITIES.get(cuda[0], (0, 0)):
        return f"CUDA {cuda[0]} dropped support"
    return ""


def _build_with_code(capability: _Capability) -> str:
    first_cuda = _FIRST_CUDA_BY_CAPABILITY.get(capability, (0, 0))
    if capability < _MIN_CAPABILITIES[13]:
        return "install a build for CUDA 12 (for PyTorch: index cu126)"
    return f"install a build for CUDA {cuda_text(first_cuda)} or newer"


def _capability_text(capability: _Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


# --- CK011 and CK013: builds and conflicts -----------------------------------------------------------


def framework_builds(context: RunContext) -> Finding:
    """PyTorch and JAX also exist in builds without CUDA, which report only that there is no GPU.

    pip installs a CPU build from an index of CPU builds, or if a resolver chooses it. torch/version.py
    contains the CUDA version of PyTorch's build; JAX needs the package jax-cuda12-plugin or
    jax-cuda13-plugin. The check imports neither package.
    """
    build_by_framework = {build.framework: build for build in require_fact(context.software.builds)}
    installed_packages = distributions(context)
    evidence = {
        f"{build.framework} {build.version}": _cuda_of_build(build)
        for build in build_by_framework.values()
    }
    problems = []
    if "torch" in build_by_framework and build_by_framework["torch"].cuda is None:
        problems.append(_torch_without_cuda(context, build_by_framework["torch"], evidence))
    if "jax" in installed_packages and not any(
        name.startswith("jax-cuda") for name in build_by_framework
    ):
        problems.append(
            warn_finding(
                f"JAX {installed_packages['jax'].version} has no CUDA plugin and runs on the CPU",
                {**evidence, "jax": installed_packages["jax"].version},
                "pip install -U 'jax[cuda13]'",
            )
        )
    summary_if_ok = (
        f"built for CUDA: {', '.join(evidence)}" if evidence else "no framework is installed"
    )
    return combine_findings(problems, otherwise=ok_finding(summary_if_ok, evidence))


def _cuda_of_build(build: Build) -> str:
    return f"CUDA {cuda_text(build.cuda)}" if build.cuda else "without CUDA"


def _torch_without_cuda(context: RunContext, build: Build, evidence: dict[str, str]) -> Finding:
    newest_major = max(_TORCH_INDEXES)
    major, _ = driver_cuda(context) or (newest_major, 0)
    index_url = _TORCH_INDEXES.get(major, _TORCH_INDEXES[newest_major])
    return fail_finding(
        f"PyTorch {build.version} was built without CUDA",
        evidence,
        f"pip install --force-reinstall torch --index-url {index_url}",
        "other builds: https://pytorch.org/get-started/locally/",
    )


def module_conflicts(context: RunContext) -> Finding:
    """Two packages that install the same module overwrite each other's files.

    The module pynvml belongs to nvidia-ml-py. The packages pynvml (deprecated) and nvidia-ml-py3 (of 2017)
    also install it: then functions are missing, memory is read wrongly, or a FutureWarning appears. CuPy
    has one package per CUDA version and fails with two. onnxruntime next to onnxruntime-gpu hides the GPU.
    Of a package that is twice on sys.path, Python imports the first copy.
    """
    installed_packages = distributions(context)
    return combine_findings(
        [*_conflicting_packages(installed_packages.keys()), *_duplicate_packages(context)],
        otherwise=ok_finding("no two packages install the same module"),
    )


def _conflicting_packages(package_names: Iterable[str]) -> Iterator[Finding]:
    for module, packages in _PACKAGES_OF_MODULES.items():
        conflicting_names = [name for name in packages if name in set(package_names)]
        if len(conflicting_names) > 1:
            preferred_name, *unwanted_names = _by_preference(module, conflicting_names)
            yield warn_finding(
                f"{' and '.join(conflicting_names)} install the same module, {module}",
                {module: ", ".join(conflicting_names)},
                f"pip uninstall -y {' '.join(unwanted_names)} && "
                f"pip install --force-reinstall --no-deps {preferred_name}",
            )


def _by_preference(module: str, package_names: list[str]) -> list[str]:
    """Sort packages, the package to keep first: NVIDIA's own, for the newest CUDA, the build for GPUs."""
    if module == "pynvml":
        return package_names
    return sorted(package_names, key=lambda name: (_cuda_major(name), "gpu" in name), reverse=True)


def _cuda_major(name: str) -> int:
    """Return the CUDA version in the name of a package: 13 for cupy-cuda13x; 0 if the name has none."""
    match = re.search(r"-cu(?:da)?(\d\d)x?(?:-|$)", name)
    return int(match[1]) if match else 0


def _duplicate_packages(context: RunContext) -> Iterator[Finding]:
    copies_by_name: dict[str, list[Distribution]] = {}
    for distribution in require_fact(context.software.distributions):
        if (
            distribution.name in ("torch", "cuda-bindings", "nvidia-ml-py", "jax")
            or "cupy" in distribution.name
        ):
            copies_by_name.setdefault(distribution.name, []).append(distribution)
    for name, duplicate_copies in copies_by_name.items():
        versions = dict.fromkeys(distribution.version for distribution in duplicate_copies)
        if len(versions) > 1:
            yield warn_finding(
                f"{name} is installed {len(duplicate_copies)} times: {' and '.join(versions)}",
                {
                    f"{name} {distribution.version}": distribution.directory
                    for distribution in duplicate_copies
                },
                f"pip uninstall {name}, until one copy is left",
            )


# --- CK012: libraries --------------------------------------------------------------------------------

# The driver's own libraries, which CK004 and CK008 check.
_DRIVER_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")


def shadowed_libraries(context: RunContext) -> Finding:
    """LD_LIBRARY_PATH should not contain other copies of the CUDA libraries that packages bring.

    PyTorch, CuPy and JAX install cuDNN, cuBLAS, NCCL and NVRTC as Python packages (nvidia-*). The loader
    may find another version of the same library on LD_LIBRARY_PATH first. Symptoms are missing symbols,
    CUDNN_STATUS_*_VERSION_MISMATCH, or slower kernels. A system toolkit that is not on LD_LIBRARY_PATH
    causes no problem.
    """
    libraries = require_fact(context.software.libraries)
    cuda_libraries = [
        library for library in libraries if not library.soname.startswith(_DRIVER_LIBRARIES)
    ]
    return combine_findings(
        _shadowing_libraries(cuda_libraries),
        otherwise=ok_finding(
            "LD_LIBRARY_PATH shadows no CUDA library of a package", _names_by_source(cuda_libraries)
        )
        if cuda_libraries
        else ok_finding("no CUDA library is on the loader's path"),
    )


def _shadowing_libraries(libraries: Sequence[Library]) -> Iterator[Finding]:
    package_copies = {
        library.soname: library for library in libraries if library.source == "package"
    }
    for library in libraries:
        package_copy = package_copies.get(library.soname)
        if (
            library.source == "LD_LIBRARY_PATH"
            and package_copy is not None
            and package_copy.real != library.real
        ):
            yield warn_finding(
                f"LD_LIBRARY_PATH has another {library.soname} before the package's",
                {library.soname: f"{library.path} before {package_copy.path}"},
                "unset LD_LIBRARY_PATH, or remove CUDA's directories from it",
            )


def _names_by_source(libraries: Iterable[Library]) -> dict[str, str]:
    names_by_source: dict[str, set[str]] = {}
    for library in libraries:
        names_by_source.setdefault(library.source, set()).add(library.soname)
    return {
        source: ", ".join(sorted(package_names))
        for source, package_names in names_by_source.items()
    }
