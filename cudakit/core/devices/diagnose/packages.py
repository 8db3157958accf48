"""Do the installed Python packages fit this driver, this GPU and one another?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok, together, warn
from cudakit.core.devices.diagnose.driver import require_driver
from cudakit.core.devices.diagnose.versions import cuda_text
from cudakit.gpu.api.run_context import Build, Distribution, RunContext
from cudakit.units import Unavailable

# The least driver of each CUDA (CUDA Compatibility, table of minor version compatibility).
_DRIVERS = {11: "450", 12: "525", 13: "580"}
# Where PyTorch keeps its builds for a CUDA that every driver of that major version runs.
_INDEXES = {
    12: "https://download.pytorch.org/whl/cu126",
    13: "https://download.pytorch.org/whl/cu130",
}
# Packages that generate code for the driver to compile: a newer minor version can be too new for it.
_COMPILERS = re.compile(r"nvidia-cuda-nvrtc(-cu\d\d)?|nvidia-nvjitlink(-cu\d\d)?|cuda-toolkit")
_BINDINGS = ("cuda-bindings", "cuda-python")

# Distributions that install the same module, so that the last one installed wins.
_SAME_MODULE = {
    "pynvml": ("nvidia-ml-py", "nvidia-ml-py3", "pynvml"),
    "cupy": ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x"),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "faiss": ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12"),
}


def distributions(c: RunContext) -> dict[str, Distribution]:
    """Return what is installed, by name; of several copies the first on the path, which is imported."""
    if isinstance(c.software.distributions, Unavailable):
        raise CannotTell(c.software.distributions.reason)
    return {one.name: one for one in reversed(c.software.distributions)}


def frameworks(c: RunContext) -> tuple[Build, ...]:
    """Return what CUDA the frameworks were built for. Raises CannotTell where that failed."""
    if isinstance(c.software.builds, Unavailable):
        raise CannotTell(c.software.builds.reason)
    return c.software.builds


def driver_new_enough(c: RunContext) -> Finding:
    """The driver must support the CUDA that packages were built for.

    A driver runs programs of its own CUDA version and of all older ones. Within one major version newer
    minor versions run as well (minor version compatibility), except that PTX of a newer NVRTC, nvcc or
    nvJitLink is refused with 222 (CUDA_ERROR_UNSUPPORTED_PTX_VERSION). CUDA 11 needs driver 450, CUDA 12
    needs 525, CUDA 13 needs 580, or newer.
    """
    offered = _driver_cuda(c)
    needs = list(_needs(c))
    evidence = {"driver": f"CUDA {cuda_text(offered)}"}
    evidence |= {what: f"CUDA {cuda_text(version)}" for what, version, _ in needs}
    return together(
        (_compared(*need, offered, evidence) for need in needs),
        otherwise=ok(
            f"the driver's CUDA {cuda_text(offered)} is new enough for what is installed", evidence
        ),
    )


def _driver_cuda(c: RunContext) -> tuple[int, int]:
    cuda = c.cuda
    if isinstance(cuda, Unavailable) or isinstance(cuda.driver_version, Unavailable):
        require_driver(c)
        raise CannotTell("the CUDA driver does not tell its version (CK005)")
    return cuda.driver_version


def _needs(c: RunContext) -> Iterator[tuple[str, tuple[int, int | None], bool]]:
    """Give what was built for a CUDA: its name, that CUDA, and whether it makes PTX."""
    for build in frameworks(c):
        if build.cuda:
            yield f"{build.framework} {build.version}", build.cuda, False
    for name, one in distributions(c).items():
        if _COMPILERS.fullmatch(name) or name in _BINDINGS:
            version = _major_minor(one.version)
            if version:
                yield f"{name} {one.version}", version, name not in _BINDINGS
    for toolkit in c.software.toolkits:
        yield f"toolkit {toolkit.path}", toolkit.cuda, True


def _major_minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def _compared(
    what: str,
    needed: tuple[int, int | None],
    makes_ptx: bool,
    offered: tuple[int, int],
    evidence: dict[str, str],
) -> Finding:
    major, minor = needed
    if major > offered[0]:
        least = _DRIVERS.get(major)
        judged = warn if what.startswith((*_BINDINGS, "toolkit")) else fail
        return judged(
            f"{what} is for CUDA {cuda_text(needed)}, the driver supports {cuda_text(offered)}",
            evidence,
            f"update the driver to {least} or newer" if least else "update the driver",
            f"or install the build for CUDA {offered[0]}",
        )
    if makes_ptx and minor is not None and major == offered[0] and minor > offered[1]:
        return warn(
            f"PTX made by {what} is too new for the driver's CUDA {cuda_text(offered)} (error 222)",
            evidence,
            "update the driver, or compile to machine code (-arch=sm_XX) instead of PTX",
        )
    return ok(what)


def built_for_cuda(c: RunContext) -> Finding:
    """PyTorch and JAX exist in builds that know no CUDA, and then say only that there is no GPU.

    pip installs the CPU build where an index of such builds was named, or a resolver chose it. PyTorch
    says in torch/version.py for which CUDA it was built; JAX needs a package jax-cuda12-plugin or
    jax-cuda13-plugin beside it. Nothing is imported to find out.
    """
    found = {build.framework: build for build in frameworks(c)}
    installed = distributions(c)
    evidence = {f"{one.framework} {one.version}": _built(one) for one in found.values()}
    problems = []
    if "torch" in found and found["torch"].cuda is None:
        problems.append(_torch_without_cuda(c, found["torch"], evidence))
    if "jax" in installed and not any(name.startswith("jax-cuda") for name in found):
        problems.append(
            warn(
                f"JAX {installed['jax'].version} has no CUDA plugin and computes on the CPU",
                {**evidence, "jax": installed["jax"].version},
                "pip install -U 'jax[cuda13]'",
            )
        )
    said = ", ".join(evidence) + " built for CUDA" if evidence else "no framework is installed"
    return together(problems, otherwise=ok(said, evidence))


def _built(build: Build) -> str:
    return f"CUDA {cuda_text(build.cuda)}" if build.cuda else "without CUDA"


def _torch_without_cuda(c: RunContext, build: Build, evidence: dict[str, str]) -> Finding:
    known = not isinstance(c.cuda, Unavailable) and isinstance(c.cuda.driver_version, tuple)
    offered = _driver_cuda(c)[0] if known else max(_INDEXES)
    index = _INDEXES.get(offered, _INDEXES[max(_INDEXES)])
    return fail(
        f"PyTorch {build.version} was built without CUDA",
        evidence,
        f"pip install --force-reinstall torch --index-url {index}",
        "other builds: https://pytorch.org/get-started/locally/",
    )


def modules_unique(c: RunContext) -> Finding:
    """Two packages that install the same module overwrite each other.

    pynvml is the module of nvidia-ml-py. The packages pynvml (deprecated) and nvidia-ml-py3 (of 2017)
    install it too: then functions are missing, memory is read wrongly, or a FutureWarning is printed.
    CuPy has a package per CUDA version and refuses to work with two. onnxruntime beside onnxruntime-gpu
    hides the GPU. A package that lies twice on sys.path is imported from the first place.
    """
    installed = distributions(c)
    return together(
        [*_rivals(installed.keys()), *_twice(c)],
        otherwise=ok("no package replaces another's module"),
    )


def _rivals(names: Iterable[str]) -> Iterator[Finding]:
    for module, rivals in _SAME_MODULE.items():
        there = [name for name in rivals if name in set(names)]
        if len(there) > 1:
            wanted, *rest = _preferred(module, there)
            yield warn(
                f"{' and '.join(there)} all install the module {module}",
                {module: ", ".join(there)},
                f"pip uninstall -y {' '.join(rest)} && pip install --force-reinstall --no-deps {wanted}",
            )


def _preferred(module: str, there: list[str]) -> list[str]:
    """Put the one to keep first: the official NVML, the newest CUDA, the one with a GPU."""
    if module == "pynvml":
        return there
    return sorted(there, key=lambda name: (_cuda_major(name), "gpu" in name), reverse=True)


def _cuda_major(name: str) -> int:
    """Return the CUDA version in the name of a package: 13 for cupy-cuda13x, 0 without one."""
    found = re.search(r"-cu(?:da)?(\d\d)x?(?:-|$)", name)
    return int(found[1]) if found else 0


def _twice(c: RunContext) -> Iterator[Finding]:
    if isinstance(c.software.distributions, Unavailable):
        return
    copies: dict[str, list[Distribution]] = {}
    for one in c.software.distributions:
        if one.name in ("torch", "cuda-bindings", "nvidia-ml-py", "jax") or "cupy" in one.name:
            copies.setdefault(one.name, []).append(one)
    for name, found in copies.items():
        versions = dict.fromkeys(one.version for one in found)
        if len(versions) > 1:
            yield warn(
                f"{name} is installed {len(found)} times: {' and '.join(versions)}",
                {f"{name} {one.version}": one.place for one in found},
                f"pip uninstall {name}, until one is left",
            )
