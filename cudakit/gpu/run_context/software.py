"""Installed Python packages, CUDA libraries and toolkits.

No package is imported: the names of metadata directories and one line of a version file are enough
(https://packaging.python.org, Recording installed projects). Libraries are listed in the order in which
the dynamic loader searches (man 8 ld.so).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.resources import files as package_files
from pathlib import Path

from cudakit.gpu.api.run_context import Build, Distribution, Library, Software, Toolkit
from cudakit.gpu.run_context.files import Files, attempt
from cudakit.units import Unavailable

# In torch/version.py: ``cuda: Optional[str] = '13.0'`` or ``cuda = None``.
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:'([\d.]+)'|\"([\d.]+)\"|None)", re.MULTILINE)
# cupy-cuda13x, jax-cuda13-plugin.
_BUILDS = re.compile(r"(?:cupy-cuda(\d\d)x?|jax-cuda(\d\d)-plugin)")
# The loader's last directories; the multiarch names are Debian's.
_SYSTEM = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
# The name that programs load: libcudnn.so.9, not libcudnn.so nor libcudnn.so.9.19.0.
_SONAME = re.compile(
    r"lib(cuda|nvidia-ml|cudart|cublas|cublasLt|cudnn|nccl|nvrtc|cupti|nvJitLink"
    r"|cusparse|cusolver|cufft|curand)\.so\.\d+(\.\d)?"
)


def read_software(
    files: Files, variables: Mapping[str, str], search_path: Iterable[str]
) -> Software:
    """Read packages, builds, libraries and toolkits; a list that cannot be read is Unavailable."""
    distributions = attempt(lambda: tuple(installed(search_path)))
    known = () if isinstance(distributions, Unavailable) else distributions
    return Software(
        distributions=distributions,
        builds=attempt(lambda: tuple(builds(known))),
        libraries=attempt(lambda: tuple(libraries(files, variables, known))),
        toolkits=tuple(toolkits(files)),
        nccl_conf=_nccl_conf(files),
        missing_extensions=tuple(_missing_extensions()),
    )


# --- packages --------------------------------------------------------------------------------------


def installed(search_path: Iterable[str]) -> Iterator[Distribution]:
    """List the packages on a search path such as sys.path, in its order."""
    for place in dict.fromkeys(os.path.abspath(part) for part in search_path):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        for name in names:
            stem, dot, kind = name.rpartition(".")
            if dot and kind in ("dist-info", "egg-info"):
                title, _, rest = stem.partition("-")
                version = rest.partition("-py")[0] or _metadata_version(place, name)
                yield Distribution(_normalized(title), version, place)


def _metadata_version(place: str, name: str) -> str:
    """Read the version of a source tree, whose egg-info has it inside only."""
    with suppress(OSError):
        for line in Path(place, name, "PKG-INFO").read_text(encoding="utf-8").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return ""


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def builds(distributions: Iterable[Distribution]) -> Iterator[Build]:
    """Return the CUDA versions that torch, CuPy and JAX were built for."""
    for distribution in distributions:
        name, version = distribution.name, distribution.version
        other = _BUILDS.fullmatch(name)
        if name == "torch":
            yield Build("torch", version, _torch_cuda(distribution))
        elif other:
            yield Build(name, version, (int(other[1] or other[2]), None))


def _torch_cuda(distribution: Distribution) -> tuple[int, int | None] | None:
    try:
        text = Path(distribution.place, "torch", "version.py").read_text(encoding="utf-8")
    except OSError:
        return _local_version(distribution.version)
    found = _TORCH_CUDA.search(text)
    if not found or not found.lastindex:
        return None
    major, _, minor = (found[1] or found[2]).partition(".")
    return int(major), int(minor.partition(".")[0]) if minor else None


def _local_version(version: str) -> tuple[int, int | None] | None:
    """Read the CUDA of a version such as 2.11.0+cu130; the last digit is the minor number."""
    found = re.search(r"\+cu(\d+)(\d)$", version)
    return (int(found[1]), int(found[2])) if found else None


# --- libraries and toolkits ------------------------------------------------------------------------


def libraries(
    files: Files, variables: Mapping[str, str], distributions: Iterable[Distribution]
) -> Iterator[Library]:
    """List the copies of the driver's and CUDA's libraries, in the order of the loader."""
    wheels = {one.place for one in distributions if one.name.startswith("nvidia-")}
    for source, directories in (
        ("LD_LIBRARY_PATH", search_path(variables)),
        ("package", _wheel_directories(files, sorted(wheels))),
        ("system", (*_ld_so_conf_directories(files), *_SYSTEM)),
        ("toolkit", _toolkit_libraries(files, variables)),
    ):
        for directory in dict.fromkeys(directories):
            for name in files.names(directory):
                if _SONAME.fullmatch(name):
                    path = f"{directory}/{name}"
                    yield Library(name, path, files.resolve(path), source)


def search_path(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the absolute directories of LD_LIBRARY_PATH."""
    parts = re.split("[:;]", variables.get("LD_LIBRARY_PATH", ""))
    return tuple(os.path.normpath(part) for part in parts if part.startswith("/"))


def _wheel_directories(files: Files, places: Iterable[str]) -> Iterator[str]:
    for place in places:
        for package in files.names(f"{place}/nvidia"):
            yield f"{place}/nvidia/{package}/lib"


def _ld_so_conf_directories(files: Files) -> Iterator[str]:
    """List the directories of /etc/ld.so.conf.d, which precede the loader's own."""
    for name in files.names("/etc/ld.so.conf.d"):
        for line in files.lines(f"/etc/ld.so.conf.d/{name}"):
            directory = line.partition("#")[0].strip()
            if directory.startswith("/"):
                yield os.path.normpath(directory)


def _toolkit_libraries(files: Files, variables: Mapping[str, str]) -> Iterator[str]:
    named = (variables.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX"))
    for place in (*filter(None, named), *toolkit_directories(files)):
        yield f"{place}/lib64"
        yield f"{place}/lib"


def toolkit_directories(files: Files) -> tuple[str, ...]:
    """Return the CUDA toolkits under /usr/local, with links resolved."""
    found = (f"/usr/local/{name}" for name in files.names("/usr/local") if name.startswith("cuda"))
    return tuple(dict.fromkeys(files.resolve(place) for place in found))


def toolkits(files: Files) -> Iterator[Toolkit]:
    """Return the toolkits whose version.json gives the version of CUDA."""
    for place in toolkit_directories(files):
        with suppress(ValueError, KeyError, TypeError):
            content = json.loads(files.text(f"{place}/version.json") or "")
            found = re.match(r"(\d+)\.(\d+)", content["cuda"]["version"])
            if found:
                yield Toolkit(place, (int(found[1]), int(found[2])))


def _nccl_conf(files: Files) -> dict[str, str]:
    """Read /etc/nccl.conf: NAME=value on each line."""
    lines = (line for line in files.lines("/etc/nccl.conf") if not line.lstrip().startswith("#"))
    pairs = (line.partition("=") for line in lines)
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


# --- cudakit itself --------------------------------------------------------------------------------

# The extensions of setup.py.
_EXTENSIONS = (
    "core/memory/load/_pickled",
    "core/allocator/_fast",
    "gpu/plugs/_buffers",
    "gpu/plugs/_native",
    "gpu/capture/_frames",
    "gpu/capture/_recorder",
)


def _missing_extensions() -> Iterator[str]:
    """Yield the C extensions of cudakit that are not installed, without importing any."""
    package = package_files("cudakit")
    for name in _EXTENSIONS:
        if not any(package.joinpath(f"{name}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
            yield name
