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
