"""Compilation of CUDA C++ with NVRTC, found in NVIDIA's wheels or the CUDA toolkit."""

from __future__ import annotations

import ctypes
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cudakit.errors import CudaError, MissingDependency

_KERNEL_PATTERN = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
# The first line of a source whose kernels have the same names as those of another source.
_SOURCE_NAME_PATTERN = re.compile(r"// source: (.+)\n")


def compile_cuda(
    source: str,
    capability: tuple[int, int],
    *,
    cache: CompileCache | None = None,
) -> bytes:
    """Compile CUDA C++ to a cubin for a compute capability such as (9, 0).

    If NVRTC is too old for the device, the result is PTX for the newest architecture that NVRTC supports,
    which the driver compiles. Results are stored in ``cache``. Raises CudaError with the compiler log
    if compilation fails, MissingDependency without NVRTC.
    """
    nvrtc = Nvrtc()
    target, image_kind = choose_target(capability, nvrtc.architectures())
    options = [f"--gpu-architecture={target}"]
    if cache is None:
        return nvrtc.compile(source, image_kind, options)
    key = cache_key(f"NVRTC {nvrtc.version}", target, (), source)
    image = cache.get(key)
    if image is None:
        image = nvrtc.compile(source, image_kind, options)
        compiler = "NVRTC {}.{}".format(*nvrtc.version)
        cache.keep(key, image, Label(_kernels_text(source), target, compiler))
    return image


def _kernels_text(source: str) -> str:
    """Return the names of the kernels, after the name of the source if its first line has one."""
    kernel_names = ", ".join(_KERNEL_PATTERN.findall(source))
    source_name = _SOURCE_NAME_PATTERN.match(source)
    return f"{source_name[1]}: {kernel_names}" if source_name else kernel_names


def choose_target(
    capability: tuple[int, int], supported_architectures: Sequence[int]
) -> tuple[str, str]:
    """Return the target architecture for NVRTC, and "CUBIN" or "PTX".

    Raises CudaError if the device is older than all supported architectures.
    """
    architecture = capability[0] * 10 + capability[1]
    if architecture in supported_architectures:
        return f"sm_{architecture}", "CUBIN"
    older_architectures = [arch for arch in supported_architectures if arch < architecture]
    if not older_architectures:
        raise CudaError(
            5,
            "NVRTC_ERROR_INVALID_OPTION",
            f"this NVRTC supports sm_{min(supported_architectures)} and newer,"
            f" the device is sm_{architecture}",
            hint="install an older nvidia-cuda-nvrtc",
        )
    return f"compute_{max(older_architectures)}", "PTX"


class Nvrtc:
    """The NVRTC compiler. Raises MissingDependency if it is not found."""

    def __init__(self) -> None:
        self._nvrtc = _load_nvrtc()
        self.version: tuple[int, int] = _check_nvrtc(self._nvrtc.nvrtcVersion())

    def architectures(self) -> list[int]:
        """Return the supported architectures as numbers, such as 90 for compute capability 9.0."""
        supported_architectures: list[int] = _check_nvrtc(self._nvrtc.nvrtcGetSupportedArchs())
        return supported_architectures

    def compile(
        self,
        source: str,
        image_kind: str,
        options: Sequence[str],
        *,
        name: str = "kernels.cu",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Compile a source to "CUBIN" or "PTX"; ``headers`` maps names to the texts of includable files.

        Raises CudaError with the compiler log if compilation fails.
        """
        nvrtc = self._nvrtc
        program = _check_nvrtc(
            nvrtc.nvrtcCreateProgram(
                source.encode(),
                name.encode(),
                len(headers),
                [text.encode() for text in headers.values()],
                [header.encode() for header in headers],
            )
        )
        try:
            compile_result = nvrtc.nvrtcCompileProgram(
                program, len(options), [option.encode() for option in options]
            )
            _check_nvrtc(compile_result, lambda: f"with {' '.join(options)}\n{self._log(program)}")
            image = bytes(_check_nvrtc(getattr(nvrtc, f"nvrtcGet{image_kind}Size")(program)))
            _check_nvrtc(getattr(nvrtc, f"nvrtcGet{image_kind}")(program, image))
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return image

    def _log(self, program: Any) -> str:
        log_bytes = bytes(_check_nvrtc(self._nvrtc.nvrtcGetProgramLogSize(program)))
        _check_nvrtc(self._nvrtc.nvrtcGetProgramLog(program, log_bytes))
        return log_bytes.rstrip(b"\0").decode(errors="replace").rstrip()


def _check_nvrtc(result: tuple[Any, ...], detail: Callable[[], str] | None = None) -> Any:
    status, *returned_values = result
    if status:
        explanation = "the CUDA C++ source does not compile" if detail else "an NVRTC call failed"
        message = f"{explanation} {detail()}" if detail else explanation
        raise CudaError(int(status), status.name, message)
    return returned_values[0] if len(returned_values) == 1 else tuple(returned_values)


def _load_nvrtc() -> Any:
    from cuda.bindings import nvrtc  # type: ignore[import-untyped]

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise MissingDependency(
            "NVRTC",
            purpose="compiling kernels",
            requirement=_nvrtc_requirement(),
            problem="was not found by cuda.bindings",
            where=" (cuda.bindings searches the site-packages of this Python),"
            " or set LD_LIBRARY_PATH to the directory of libnvrtc",
        ) from error
    return nvrtc


def _nvrtc_requirement() -> str:
    from importlib.metadata import version

    is_cuda_12 = version("cuda-bindings").startswith("12.")
    return "nvidia-cuda-nvrtc-cu12" if is_cuda_12 else "nvidia-cuda-nvrtc"


# --- A cache of compiled kernels on disk -----------------------------------------------------------
#
# The file name is a hash of compiler, target, options and source. The content is a SHA-256 checksum, the
# label of the image in JSON on one line, and the image. Read and write errors are ignored, unless ``cache
# warm`` writes the images: an unreadable image is compiled again.
#
# Images run on the GPU, so an image is read only if no other user can have written it: its directory and its
# file belong to this user, are no symbolic links, and are not writable by the group or by others.

_FORMAT_VERSION = "cudakit compiled kernels 2"  # format version, part of each key
_DIGEST_BYTES = 32
_IMAGE_SUFFIX = ".image"
_TEMPORARY_PREFIX = "tmp"


@dataclass(frozen=True, slots=True)
class Label:
    """The content of an image, for people who list the cache."""

    kernels: (
        str  # names of the kernels, separated by commas; with the name of the source, "name: a, b"
    )
    target: str  # architecture of the image, such as "sm_90"
    compiler: str  # compiler and its version, such as "NVRTC 13.0"


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image in the cache."""

    label: Label
    size_bytes: int  # size of the file
    written_ns: int  # time of the last write, in nanoseconds since 1970


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Compiled images by key, in a directory that is created at the first write.

    The number and the total size of the images are limited, because programs may generate any number of
    sources. Above a limit, the oldest images are deleted.
    """

    directory: Path
    max_images: int = 512
    max_bytes: int = 256 << 20
    reports_errors: bool = False  # whether ``keep`` raises OSError if an image cannot be stored

    def get(self, key: str) -> bytes | None:
        """Return an image; None if it is missing or damaged, or if another user can have written it."""
        try:
            with self._open_directory() as directory_descriptor:
                return _read_image(directory_descriptor, _file_name(key))[1]
        except (OSError, ValueError):
            return None

    def keep(self, key: str, image: bytes, label: Label) -> None:
        """Store an image atomically, and delete the oldest images above the limits.

        Raises OSError only if ``reports_errors`` is true: most callers have the image, and need no cache.
        """
        content = json.dumps(asdict(label)).encode() + b"\n" + image
        with nullcontext() if self.reports_errors else suppress(OSError):
            _make_private_directories(self.directory)
            with self._open_directory() as directory_descriptor:
                _write_atomically(
                    directory_descriptor, _file_name(key), sha256(content).digest() + content
                )
                self._delete_oldest(directory_descriptor)

    def images(self) -> tuple[list[CachedImage], int]:
        """Return the images, newest first, and the number of files that are not usable.

        Raises PermissionError if another user can have written in the directory. A missing directory is an
        empty cache.
        """
        images: list[CachedImage] = []
        unusable_count = 0
        try:
            with self._open_directory() as directory_descriptor:
                for name in _image_names(directory_descriptor):
                    try:
                        label, _ = _read_image(directory_descriptor, name)
                        file_status = os.stat(name, dir_fd=directory_descriptor)
                        images.append(
                            CachedImage(label, file_status.st_size, file_status.st_mtime_ns)
                        )
                    except (OSError, ValueError):
                        unusable_count += 1
        except FileNotFoundError:
            pass
        return sorted(images, key=lambda image: -image.written_ns), unusable_count

    def clear(self) -> tuple[int, int]:
        """Delete all images, and files that an interrupted write left; return their number and size in bytes.

        Raises PermissionError if another user can have written in the directory.
        """
        deleted_count = deleted_bytes = 0
        try:
            with self._open_directory() as directory_descriptor:
                for name in os.listdir(directory_descriptor):
                    if name.endswith(_IMAGE_SUFFIX) or name.startswith(_TEMPORARY_PREFIX):
                        with suppress(FileNotFoundError):
                            deleted_bytes += os.stat(
                                name, dir_fd=directory_descriptor, follow_symlinks=False
                            ).st_size
                            os.unlink(name, dir_fd=directory_descriptor)
                            deleted_count += 1
        except FileNotFoundError:
            pass
        return deleted_count, deleted_bytes

    def _delete_oldest(self, directory_descriptor: int) -> None:
        files = []
        for name in _image_names(directory_descriptor):
            with suppress(FileNotFoundError):
                file_status = os.stat(name, dir_fd=directory_descriptor, follow_symlinks=False)
                files.append((file_status.st_mtime_ns, file_status.st_size, name))
        files.sort(reverse=True)
        total_bytes = 0
        for position, (_, size_bytes, name) in enumerate(files):
            total_bytes += size_bytes
            # The newest image stays, however large it is.
            if position >= self.max_images or (position and total_bytes > self.max_bytes):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory_descriptor)

    @contextmanager
    def _open_directory(self) -> Iterator[int]:
        """Open the directory. Raises OSError if another user can have written in it."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        directory_descriptor = os.open(self.directory, flags)
        try:
            _check_owner(directory_descriptor, stat.S_IFDIR)
            yield directory_descriptor
        finally:
            os.close(directory_descriptor)


def _read_image(directory_descriptor: int, name: str) -> tuple[Label, bytes]:
    """Return the label and the image of a file.

    Raises ValueError if the file is damaged, OSError if it is missing or another user can have written it.
    """
    # Without O_NONBLOCK, opening a pipe would block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=directory_descriptor), "rb") as file:
        _check_owner(file.fileno(), stat.S_IFREG)
        digest, content = file.read(_DIGEST_BYTES), file.read()
    if sha256(content).digest() != digest:
        raise ValueError("the checksum is wrong")
    line, _, image = content.partition(b"\n")
    fields = json.loads(line)
    return Label(fields["kernels"], fields["target"], fields["compiler"]), image


def _image_names(directory_descriptor: int) -> list[str]:
    return [name for name in os.listdir(directory_descriptor) if name.endswith(_IMAGE_SUFFIX)]


def _file_name(key: str) -> str:
    return f"{key}{_IMAGE_SUFFIX}"


def _check_owner(file_descriptor: int, file_type: int) -> None:
    """Raise PermissionError unless an open file has the expected type, and only this user can write it."""
    file_status = os.fstat(file_descriptor)
    only_user_can_write = file_status.st_uid == os.geteuid() and not file_status.st_mode & (
        stat.S_IWGRP | stat.S_IWOTH
    )
    if stat.S_IFMT(file_status.st_mode) != file_type or not only_user_can_write:
        raise PermissionError("another user can have written this")


def _make_private_directories(path: Path) -> None:
    """Make a directory and its missing parents, for this user only."""
    for directory in (*reversed(path.parents), path):
        if not directory.exists():
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)


def _write_atomically(directory_descriptor: int, name: str, content: bytes) -> None:
    partial_name = f"{_TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial_name, flags, 0o600, dir_fd=directory_descriptor)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(
            partial_name, name, src_dir_fd=directory_descriptor, dst_dir_fd=directory_descriptor
        )
    except BaseException:
        os.unlink(partial_name, dir_fd=directory_descriptor)
        raise


def cache_key(compiler: str, target: str, options: Sequence[str], source: str) -> str:
    """Return the cache key of a compilation."""
    key_parts = (_FORMAT_VERSION, compiler, target, *options, source)
    return sha256(
        b"".join(_length_prefixed(key_part.encode()) for key_part in key_parts)
    ).hexdigest()


def user_cache(variables: Mapping[str, str]) -> CompileCache | None:
    """Return the cache in ``CUDAKIT_CACHE_DIR``, or else in the user's XDG cache directory.

    Without both variables and without a home directory there is no cache, and the result is None.
    """
    if directory := variables.get("CUDAKIT_CACHE_DIR", ""):
        return CompileCache(Path(directory).absolute() / "kernels")
    cache_home = variables.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):  # the XDG Base Directory Specification ignores relative paths
        return CompileCache(Path(cache_home) / "cudakit" / "kernels")
    try:
        return CompileCache(Path.home() / ".cache" / "cudakit" / "kernels")
    except RuntimeError:
        return None


def _length_prefixed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


# --- Demangling of C++ symbols (Itanium C++ ABI, section 5.1) --------------------------------------

# The C++ runtime. It is usually present, because numpy's extension modules link it.
_CPP_RUNTIME = "libstdc++.so.6"

# Maximum length of a name to demangle; kernel names are shorter in practice.
_MAX_NAME_LENGTH = 64 * 1024


def demangle(name: str) -> str:
    """Return the demangled form of a mangled name, and any other name unchanged.

    Uses ``__cxa_demangle`` of the C++ runtime (Itanium C++ ABI, section 3.4); without it, returns the name.
    """
    if not name.startswith("_Z") or len(name) > _MAX_NAME_LENGTH:
        return name
    return _demangler()(name)


@cache
def _demangler() -> Callable[[str], str]:
    try:
        library = ctypes.CDLL(_CPP_RUNTIME)
    except OSError:
        return str
    cxa_demangle = library.__cxa_demangle
    cxa_demangle.restype = ctypes.c_void_p
    cxa_demangle.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    free_memory = ctypes.CDLL(None).free
    free_memory.argtypes = [ctypes.c_void_p]

    def demangle_with_library(name: str) -> str:
        demangled_address = cxa_demangle(name.encode("utf-8", "surrogateescape"), None, None, None)
        if demangled_address is None:
            return name
        try:
            return ctypes.string_at(demangled_address).decode("utf-8", "surrogateescape")
        finally:
            free_memory(demangled_address)

    return demangle_with_library
