"""Checks that packages and libraries suit the driver, the GPUs and each other (CK009 to CK013)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cudakit.devices.doctor.check import (
    Finding,
    NotCheckable,
    fail,
    ok,
    require_fact,
    warn,
)
from cudakit.devices.doctor.driver import cuda_text, driver_cuda, require_driver
from cudakit.gpu.api.facts import Distribution, RunContext

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


def driver_version(context: RunContext) -> Iterator[Finding]:
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
    driver_text = cuda_text(supported_cuda)
    requirements = list(_requirements(context))
    evidence = {"driver": f"CUDA {driver_text}"} | {
        requirement.name: f"CUDA {cuda_text(requirement.cuda)}" for requirement in requirements
    }
    has_newer_minor = False
    for requirement in requirements:
        major, minor = requirement.cuda
        if major > supported_cuda[0]:
            oldest_driver = _MIN_DRIVERS.get(major)
            make_finding = fail if requirement.is_used else warn
            yield make_finding(
                f"{requirement.name} needs CUDA {cuda_text(requirement.cuda)}, "
                f"but the driver supports {driver_text}",
                evidence,
                f"update the driver to {oldest_driver} or newer"
                if oldest_driver
                else "update the driver",
                f"or install a build for CUDA {supported_cuda[0]}",
            )
        elif major == supported_cuda[0] and (minor or 0) > supported_cuda[1]:
            has_newer_minor = True
            if requirement.generates_ptx:
                yield warn(
                    f"PTX from {requirement.name} is too new for the driver's CUDA {driver_text} "
                    "(error 222)",
                    evidence,
                    "update the driver, or compile to machine code (-arch=sm_XX) instead of PTX",
                )
    if requirements:
        reason = f": minor versions of CUDA {supported_cuda[0]} are compatible"
        yield ok(
            f"the driver's CUDA {driver_text} is new enough for the installed packages"
            f"{reason if has_newer_minor else ''}",
            evidence,
        )
    else:
        yield ok(
            f"the driver supports CUDA {driver_text}; no installed package needs CUDA", evidence
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
        is_compiler = _PTX_COMPILERS.fullmatch(name) is not None
        match = re.match(r"(\d+)\.(\d+)", package.version)
        if match and (is_compiler or name in _BINDING_PACKAGES):
            yield _CudaRequirement(
                f"{name} {package.version}",
                (int(match[1]), int(match[2])),
                is_compiler,
                is_used=is_compiler,
            )
    for toolkit in context.software.toolkits:
        yield _CudaRequirement(
            f"toolkit {toolkit.path}", toolkit.cuda, generates_ptx=True, is_used=False
        )


# --- CK010: compute capabilities ---------------------------------------------------------------------


def architectures(context: RunContext) -> Iterator[Finding]:
    """A framework must contain code for the GPU's compute capability, or PTX that the driver can compile.

    A build for CUDA 12.4 has no code for Blackwell, which CUDA 12.8 added, and a build for CUDA 13 has
    none for Volta and older: kernels then fail with 209 ("no kernel image is available"). The check
    compares the CUDA version of each build with the GPU; a build can leave out more architectures, which
    torch.cuda.get_arch_list() lists.
    """
    capabilities: dict[str, _Capability] = {}
    for device in context.cuda_devices or context.nvml_devices:
        name, capability_text = device.fields.get("name"), device.fields.get("compute_capability")
        if isinstance(name, str) and isinstance(capability_text, str):
            major, _, minor = capability_text.partition(".")
            capabilities[name] = (int(major), int(minor))
    if not capabilities:
        raise NotCheckable("the compute capability of the GPUs is unknown (CK003, CK005)")
    texts = {name: f"{major}.{minor}" for name, (major, minor) in capabilities.items()}
    evidence = {name: f"compute capability {text}" for name, text in texts.items()}
    builds = require_fact(context.software.builds)
    for name, capability in capabilities.items():
        if capability < _MIN_TESTED_CAPABILITY:
            yield fail(
                f"{name} has compute capability {texts[name]}; "
                f"cudakit needs {cuda_text(_MIN_TESTED_CAPABILITY)}",
                evidence,
                "use a Turing or newer GPU",
            )
    for build in builds:
        for name, capability in capabilities.items():
            reason = _reason_without_code(build.cuda, capability) if build.cuda else ""
            if reason:
                first_cuda = _FIRST_CUDA_BY_CAPABILITY.get(capability, (0, 0))
                yield fail(
                    f"{build.framework} {build.version} has no code for {name} "
                    f"(sm_{capability[0]}{capability[1]}): {reason}",
                    {**evidence, build.framework: f"CUDA {cuda_text(build.cuda or (0, 0))}"},
                    "install a build for CUDA 12 (for PyTorch: index cu126)"
                    if capability < _MIN_CAPABILITIES[13]
                    else f"install a build for CUDA {cuda_text(first_cuda)} or newer",
                )
    gpus = ", ".join(f"{name} ({text})" for name, text in texts.items())
    if any(build.cuda for build in builds):
        yield ok(f"the installed builds support {gpus}", evidence)
    else:
        yield ok(f"cudakit supports {gpus}; no framework built for CUDA is installed", evidence)


def _reason_without_code(cuda: tuple[int, int | None], capability: _Capability) -> str:
    first_cuda = _FIRST_CUDA_BY_CAPABILITY.get(capability)
    # If the minor version is unknown, the newest one is assumed.
    newest_cuda = (cuda[0], 99 if cuda[1] is None else cuda[1])
    if first_cuda and newest_cuda < first_cuda:
        return f"support starts with CUDA {cuda_text(first_cuda)}"
    if capability < _MIN_CAPABILITIES.get(cuda[0], (0, 0)):
        return f"CUDA {cuda[0]} dropped support"
    return ""


# --- CK011 and CK013: builds and conflicts -----------------------------------------------------------


def framework_builds(context: RunContext) -> Iterator[Finding]:
    """PyTorch and JAX also exist in builds without CUDA, which report only that there is no GPU.

    pip installs a CPU build from an index of CPU builds, or if a resolver chooses it. torch/version.py
    contains the CUDA version of PyTorch's build; JAX needs the package jax-cuda12-plugin or
    jax-cuda13-plugin. The check imports neither package.
    """
    builds = {build.framework: build for build in require_fact(context.software.builds)}
    evidence = {
        f"{build.framework} {build.version}": f"CUDA {cuda_text(build.cuda)}"
        if build.cuda
        else "without CUDA"
        for build in builds.values()
    }
    if "torch" in builds and builds["torch"].cuda is None:
        newest_major = max(_TORCH_INDEXES)
        major, _ = driver_cuda(context) or (newest_major, 0)
        index_url = _TORCH_INDEXES.get(major, _TORCH_INDEXES[newest_major])
        yield fail(
            f"PyTorch {builds['torch'].version} was built without CUDA",
            evidence,
            f"pip install --force-reinstall torch --index-url {index_url}",
            "other builds: https://pytorch.org/get-started/locally/",
        )
    jax = distributions(context).get("jax")
    if jax and not any(name.startswith("jax-cuda") for name in builds):
        yield warn(
            f"JAX {jax.version} has no CUDA plugin and runs on the CPU",
            {**evidence, "jax": jax.version},
            "pip install -U 'jax[cuda13]'",
        )
    built = f"built for CUDA: {', '.join(evidence)}" if evidence else "no framework is installed"
    yield ok(built, evidence)


def module_conflicts(context: RunContext) -> Iterator[Finding]:
    """Two packages that install the same module overwrite each other's files.

    The module pynvml belongs to nvidia-ml-py. The packages pynvml (deprecated) and nvidia-ml-py3 (of 2017)
    also install it: then functions are missing, memory is read wrongly, or a FutureWarning appears. CuPy
    has one package per CUDA version and fails with two. onnxruntime next to onnxruntime-gpu hides the GPU.
    Of a package that is twice on sys.path, Python imports the first copy.
    """
    installed = distributions(context)
    for module, packages in _PACKAGES_OF_MODULES.items():
        names = [name for name in packages if name in installed]
        if len(names) > 1:
            conflict = f"{' and '.join(names)} install the same module, {module}"
            evidence = {module: ", ".join(names)}
            if module != "pynvml":  # keep the package for the newest CUDA, and the build for GPUs
                names.sort(key=lambda name: (_cuda_major(name), "gpu" in name), reverse=True)
            preferred, *unwanted = names
            yield warn(
                conflict,
                evidence,
                f"pip uninstall -y {' '.join(unwanted)} && "
                f"pip install --force-reinstall --no-deps {preferred}",
            )
    copies_by_name: dict[str, list[Distribution]] = {}
    for package in require_fact(context.software.distributions):
        name = package.name
        if name in ("torch", "cuda-bindings", "nvidia-ml-py", "jax") or "cupy" in name:
            copies_by_name.setdefault(name, []).append(package)
    for name, copies in copies_by_name.items():
        versions = dict.fromkeys(package.version for package in copies)
        if len(versions) > 1:
            yield warn(
                f"{name} is installed {len(copies)} times: {' and '.join(versions)}",
                {f"{name} {package.version}": package.directory for package in copies},
                f"pip uninstall {name}, until one copy is left",
            )
    yield ok("no two packages install the same module")


def _cuda_major(name: str) -> int:
    """Return the CUDA version in the name of a package: 13 for cupy-cuda13x; 0 if the name has none."""
    match = re.search(r"-cu(?:da)?(\d\d)x?(?:-|$)", name)
    return int(match[1]) if match else 0


# --- CK012: libraries --------------------------------------------------------------------------------

# The driver's own libraries, which CK004 and CK008 check.
_DRIVER_LIBRARIES = ("libcuda.so", "libnvidia-ml.so")


def shadowed_libraries(context: RunContext) -> Iterator[Finding]:
    """LD_LIBRARY_PATH should not contain other copies of the CUDA libraries that packages bring.

    PyTorch, CuPy and JAX install cuDNN, cuBLAS, NCCL and NVRTC as Python packages (nvidia-*). The loader
    may find another version of the same library on LD_LIBRARY_PATH first. Symptoms are missing symbols,
    CUDNN_STATUS_*_VERSION_MISMATCH, or slower kernels. A system toolkit that is not on LD_LIBRARY_PATH
    causes no problem.
    """
    libraries = [
        library
        for library in require_fact(context.software.libraries)
        if not library.soname.startswith(_DRIVER_LIBRARIES)
    ]
    copies = {library.soname: library for library in libraries if library.source == "package"}
    names_by_source: dict[str, set[str]] = {}
    for library in libraries:
        names_by_source.setdefault(library.source, set()).add(library.soname)
        copy = copies.get(library.soname)
        if library.source == "LD_LIBRARY_PATH" and copy and copy.real != library.real:
            yield warn(
                f"LD_LIBRARY_PATH has another {library.soname} before the package's",
                {library.soname: f"{library.path} before {copy.path}"},
                "unset LD_LIBRARY_PATH, or remove CUDA's directories from it",
            )
    if libraries:
        evidence = {source: ", ".join(sorted(names)) for source, names in names_by_source.items()}
        yield ok("LD_LIBRARY_PATH shadows no CUDA library of a package", evidence)
    else:
        yield ok("no CUDA library is on the loader's path")
