"""Checks of the copies of the driver's and CUDA's libraries that programs load (CK008, CK012)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cudakit.core.devices.diagnose.check import Finding, NotCheckable, combine, fail, ok, warn
from cudakit.core.devices.diagnose.driver import (
    as_numbers,
    libcuda_path,
    libcuda_version,
    require_driver,
)
from cudakit.gpu.api.run_context import Library, RunContext
from cudakit.units import Unavailable

# The driver's own libraries, which CK004 and CK008 check.
_DRIVER = ("libcuda.so", "libnvidia-ml.so")


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
    evidence = {"libcuda": path, **_others(c, path)}
    if "/stubs/" in path:
        return fail(
            "the stub of libcuda is loaded, which cannot run anything", evidence, _off_path("stubs")
        )
    if "compat" in path:
        return _compat(c, path, evidence)
    return ok(f"libcuda is the driver's: {path}", evidence)


def _compat(c: RunContext, path: str, evidence: dict[str, str]) -> Finding:
    own, module = libcuda_version(c), c.driver.module
    evidence |= {"kernel module": module.version if module else "?"}
    code = c.cuda_error
    if code in (803, 804):
        why = "this GPU does not support" if code == 804 else "this driver does not fit"
        return fail(
            f"libcuda is cuda-compat's, which {why} ({code})", evidence, _off_path("compat")
        )
    if own and module and as_numbers(own) < as_numbers(module.version):
        return warn(
            f"cuda-compat's libcuda {own} is older than the driver {module.version}, and hides its CUDA",
            evidence,
            _off_path("compat"),
        )
    return ok(f"libcuda is cuda-compat's, for forward compatibility: {path}", evidence)


def _off_path(mark: str) -> str:
    return (
        f"take the directory named {mark} off LD_LIBRARY_PATH (or /etc/ld.so.conf.d), "
        "or uninstall its package"
    )


def _others(c: RunContext, path: str) -> dict[str, str]:
    if isinstance(c.software.libraries, Unavailable):
        return {}
    copies = [
        one for one in c.software.libraries if one.soname == "libcuda.so.1" and one.real != path
    ]
    paths = dict.fromkeys(one.real for one in copies)
    return {"other copies": ", ".join(paths)} if paths else {}


def shadowed_libraries(c: RunContext) -> Finding:
    """LD_LIBRARY_PATH should not put other copies of CUDA's libraries before a package's own.

    PyTorch, CuPy and JAX bring cuDNN, cuBLAS, NCCL and NVRTC as Python packages (nvidia-*). A directory
    on LD_LIBRARY_PATH with the same library in another version is found before them by whatever does not
    fix its own path: symptoms are missing symbols, CUDNN_STATUS_*_VERSION_MISMATCH, or slower kernels. A
    system toolkit that is not on LD_LIBRARY_PATH harms nobody.
    """
    if isinstance(c.software.libraries, Unavailable):
        raise NotCheckable(c.software.libraries.reason)
    found = [one for one in c.software.libraries if not one.soname.startswith(_DRIVER)]
    places = sorted({one.source for one in found})
    return combine(
        _shadowed(found),
        otherwise=ok("no copy of a CUDA library hides another", _census(found))
        if places
        else ok("no CUDA library lies where the loader looks"),
    )


def _shadowed(found: Iterable[Library]) -> Iterator[Finding]:
    known = list(found)
    packaged = {one.soname: one for one in known if one.source == "package"}
    for one in known:
        other = packaged.get(one.soname)
        if one.source == "LD_LIBRARY_PATH" and other is not None and other.real != one.real:
            yield warn(
                f"LD_LIBRARY_PATH puts another {one.soname} before the package's",
                {one.soname: f"{one.path} before {other.path}"},
                "unset LD_LIBRARY_PATH, or take the directories of CUDA off it",
            )


def _census(found: Iterable[Library]) -> dict[str, str]:
    by_source: dict[str, list[str]] = {}
    for one in found:
        by_source.setdefault(one.source, []).append(one.soname)
    return {source: ", ".join(sorted(set(names))) for source, names in by_source.items()}
