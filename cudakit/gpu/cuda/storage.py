"""NVIDIA's cuFile: transfers between files and device memory (cuFile API Reference Guide)."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cudakit.errors import EnvironmentUnusable, MissingDependency, StorageError, Unsupported
from cudakit.gpu.api import Ptr, StoragePath

_T = TypeVar("_T")

# Level of cuFile's statistics that counts the transfers of each data path.
_PATH_STATISTICS = 3
# CUfileDrvProps_t begins with the major version of nvidia-fs; the structure is smaller than this buffer.
_PROPERTIES_BYTES = 256
# The variable with the path of a configuration, and the default path (cuFile, "Environment Variables").
_CONFIGURATION_VARIABLE = "CUFILE_ENV_PATH_JSON"
_SYSTEM_CONFIGURATION = Path("/etc/cufile.json")
_P2PDMA_VARIABLE = "CUFILE_USE_PCIP2PDMA"
# udev's database, which has a file per block device, and the properties that cuFile needs there. Without
# these properties cuFileHandleRegister fails: with error 5027 in cuFile 1.20, with error 5030 in cuFile 1.13.
_UDEV_DATABASE = Path("/run/udev/data")
_UDEV_PROPERTIES = ("ID_FS_USAGE", "ID_FS_TYPE")
# The list of kernel modules. If the kernel supports no modules, cuFileDriverOpen tries to read it forever.
_KERNEL_MODULES = Path("/proc/modules")
# cuFile may crash or hang while it opens a file, so a child process opens it first. cuFile 1.15 crashes on
# ext4 if the mount options do not include data= (H200, 2026-11-23).
_OPEN_FILE = """
import sys
from cudakit.gpu.cuda.storage import open_once
from cudakit.gpu.open import open_gpu
open_once(open_gpu("cuda"), sys.argv[1])
"""
_OPEN_TIMEOUT_S = 60.0
_LOG = "cufile.log"
_PURPOSE = "cudakit bench gds"
_REQUIREMENT = "cudakit[gds]"


class StorageDevice(Protocol):
    """The method of a real device that cuFile needs."""

    def in_context(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function with the device's context current in this thread."""


class CuFile:
    """The driver of cuFile, open until ``close``.

    Raises MissingDependency without libcufile, Unsupported if cuFile does not start on this machine.
    """

    def __init__(self, gpu: StorageDevice) -> None:
        self._gpu = gpu
        _allow_compatibility_mode()
        self._cufile = _import_cufile()
        self._registered_buffers: list[Ptr] = []
        self._is_open = False
        if not _KERNEL_MODULES.exists():
            raise Unsupported(
                f"cuFile does not start without {_KERNEL_MODULES}, which kernels without modules lack"
            )
        try:
            self.call("cuFileDriverOpen", self._cufile.driver_open)
        except EnvironmentUnusable as error:
            raise Unsupported(f"cuFile does not start here: {error.message}") from error
        self._is_open = True
        # Statistics cost time in each transfer, and cuFile 1.15 crashes if they are stopped after transfers.
        can_be_direct = bool(self._driver_version()) or uses_p2pdma(os.environ)
        self._has_statistics = can_be_direct and self._start_statistics()

    @property
    def version(self) -> str:
        """Version of the library: cuFile reports major * 1000 + minor * 10."""
        version = int(self._cufile.get_version())
        return f"{version // 1000}.{version % 1000 // 10}"

    def call(self, name: str, function: Callable[..., _T], *args: object) -> _T:
        """Call a function of cuFile in the device's context; its errors become EnvironmentUnusable."""
        try:
            return self._gpu.in_context(function, *args)
        except self._cufile.cuFileError as error:
            raise EnvironmentUnusable(
                f"{name} failed: {error}",
                hint="without GPUDirect Storage (cudakit doctor --all, CK038), cuFile needs "
                "allow_compat_mode in its cufile.json",
            ) from error

    def open(self, path: Path, *, writable: bool, direct: bool) -> CuFileFile:
        """Open a file and register its handle. Raises Unsupported if cuFile refuses the file, or crashes."""
        if crash := _crash_of_cufile(path):
            raise Unsupported(f"cuFile {crash}")
        return self.open_unchecked(path, writable=writable, direct=direct)

    def open_unchecked(self, path: Path, *, writable: bool, direct: bool) -> CuFileFile:
        """Open a file in this process, which ends if cuFile crashes."""
        return CuFileFile(self, self._cufile, path, writable=writable, direct=direct)

    def register(self, buffer: Ptr, size_bytes: int) -> bool:
        """Register device memory until ``close``, and return whether cuFile supports that here."""
        try:
            self.call("cuFileBufRegister", self._cufile.buf_register, int(buffer), size_bytes, 0)
        except EnvironmentUnusable:
            return False
        self._registered_buffers.append(buffer)
        return True

    def path_used(self) -> StoragePath:
        """Return the data path of the transfers so far, according to cuFile's statistics or its driver.

        Without statistics, the path is "compatibility" if the driver nvidia-fs is missing, else unknown.
        """
        if self._has_statistics and (path_counts := self._path_counts()):
            direct_count, posix_count = path_counts
            if direct_count or posix_count:
                return "compatibility" if posix_count else "direct"
        return "unknown" if self._driver_version() else "compatibility"

    def close(self) -> None:
        """Release registered memory and close cuFile's driver."""
        if not self._is_open:
            return
        self._is_open = False
        for buffer in self._registered_buffers:
            with suppress(EnvironmentUnusable):
                self.call("cuFileBufDeregister", self._cufile.buf_deregister, int(buffer))
        with suppress(EnvironmentUnusable):
            self.call("cuFileDriverClose", self._cufile.driver_close)

    def _start_statistics(self) -> bool:
        """Make cuFile count the transfers of each data path; versions before 1.15 cannot count."""
        try:
            self._cufile.set_stats_level(_PATH_STATISTICS)
            self._cufile.stats_start()
        except Exception:  # noqa: BLE001  # errors of several types: not found, not supported
            return False
        return True

    def _path_counts(self) -> tuple[int, int] | None:
        """Return the number of direct transfers and of those through host memory; None if unknown."""
        statistics = self._cufile.StatsLevel3()
        try:
            self._cufile.get_stats_l3(statistics.ptr)
            gpu_statistics = [statistics.per_gpu_stats[i] for i in range(int(statistics.num_gpus))]
            direct_count = sum(
                int(getattr(gpu, f"n_{path}_{direction}"))
                for gpu in gpu_statistics
                for path in ("p2p", "nvfs")
                for direction in ("reads", "writes")
            )
            posix_count = sum(
                int(gpu.n_posix_reads) + int(gpu.n_posix_writes) for gpu in gpu_statistics
            )
        except Exception:  # noqa: BLE001  # the layout differs between versions
            return None
        return direct_count, posix_count

    def _driver_version(self) -> int:
        """Return the major version of the kernel driver nvidia-fs; 0 if it is not loaded."""
        properties = ctypes.create_string_buffer(_PROPERTIES_BYTES)
        self.call(
            "cuFileDriverGetProperties",
            self._cufile.driver_get_properties,
            ctypes.addressof(properties),
        )
        return int.from_bytes(properties.raw[:4], "little")


class CuFileFile:
    """A file that is registered with cuFile."""

    def __init__(
        self, driver: CuFile, cufile: Any, path: Path, *, writable: bool, direct: bool
    ) -> None:
        self._driver, self._cufile = driver, cufile
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
        self._descriptor = os.open(path, flags)
        description = cufile.Descr()
        description.type = cufile.FileHandleType.OPAQUE_FD
        description.handle.fd = self._descriptor
        try:
            self._handle = driver.call(
                "cuFileHandleRegister", cufile.handle_register, description.ptr
            )
        except EnvironmentUnusable as error:
            reason = explain_refusal(error.message, os.fstat(self._descriptor).st_dev)
            os.close(self._descriptor)
            raise Unsupported(f"cuFile refuses the file: {reason}") from error
        self._is_open = True

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Read bytes of the file to device memory, and wait."""
        arguments = (size_bytes, file_offset, buffer_offset)
        self._transfer("cuFileRead", self._cufile.read, buffer, *arguments)

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Write device memory to the file, and wait."""
        arguments = (size_bytes, file_offset, buffer_offset)
        self._transfer("cuFileWrite", self._cufile.write, buffer, *arguments)

    def close(self) -> None:
        """Deregister and close the file."""
        if self._is_open:
            self._is_open = False
            with suppress(EnvironmentUnusable):
                self._driver.call(
                    "cuFileHandleDeregister", self._cufile.handle_deregister, self._handle
                )
            os.close(self._descriptor)

    def _transfer(
        self,
        name: str,
        function: Callable[..., int],
        buffer: Ptr,
        size_bytes: int,
        file_offset: int,
        buffer_offset: int,
    ) -> None:
        try:
            transferred_bytes = self._driver.call(
                name, function, self._handle, int(buffer), size_bytes, file_offset, buffer_offset
            )
        except EnvironmentUnusable as error:
            raise StorageError(error.message, hint=error.hint) from error
        if transferred_bytes != size_bytes:
            raise StorageError(
                f"{name} moved {transferred_bytes} of {size_bytes} bytes at offset {file_offset}"
            )


def explain_refusal(message: str, device: int, database: Path = _UDEV_DATABASE) -> str:
    """Return why cuFile refused a file on a device (stat(2), st_dev), or its own ``message``."""
    major, minor = os.major(device), os.minor(device)
    if not major:
        return f"{message}; the file is on no block device, as on tmpfs and overlay file systems"
    path = database / f"b{major}:{minor}"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    missing_names = [
        name
        for name in _UDEV_PROPERTIES
        if not any(line.startswith(f"E:{name}=") for line in lines)
    ]
    if not missing_names:
        return message
    return (
        f"{path} of udev's database does not have {' and '.join(missing_names)} of the drive; in a "
        "container: docker run -v /run/udev:/run/udev:ro"
    )


def open_once(gpu: StorageDevice, path: str) -> None:
    """Open a file with cuFile and close it. Called in a child process, which ignores errors."""
    with suppress(Exception), closing(CuFile(gpu)) as storage:
        storage.open_unchecked(Path(path), writable=False, direct=False).close()


@cache
def _crash_of_cufile(path: Path) -> str:
    return find_crash([sys.executable, "-P", "-c", _OPEN_FILE, str(path.absolute())])


def find_crash(command: Sequence[str], timeout_s: float = _OPEN_TIMEOUT_S) -> str:
    """Run a command that opens a file with cuFile; return how it crashed or hung, or an empty text.

    The text has the last error in the log that cuFile writes to the current directory.
    """
    with tempfile.TemporaryDirectory(prefix="cudakit-cufile-") as directory:
        try:
            status = subprocess.run(  # noqa: S603  # our own command
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"did not open the file within {timeout_s:.0f} s"
        if status >= 0:
            return ""
        name = signal.Signals(-status).name
        log = Path(directory, _LOG)
        lines = (
            log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        )
    errors = [line.partition("ERROR")[2].split(maxsplit=1)[-1] for line in lines if "ERROR" in line]
    return f"crashes ({name}) when it opens the file" + (f": {errors[-1]}" if errors else "")


def uses_p2pdma(variables: Mapping[str, str]) -> bool:
    """Return whether cuFile may use PCI P2PDMA of the Linux kernel, which does not need nvidia-fs.

    The setting is properties.use_pci_p2pdma of the configuration, or the variable CUFILE_USE_PCIP2PDMA.
    """
    if variables.get(_P2PDMA_VARIABLE, "").lower() in ("true", "1"):
        return True
    configuration = Path(variables.get(_CONFIGURATION_VARIABLE, str(_SYSTEM_CONFIGURATION)))
    try:
        text = configuration.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The file is JSON with comments, which json.loads refuses.
    return re.search(r'^\s*"use_pci_p2pdma"\s*:\s*true', text, re.MULTILINE) is not None


@cache
def _allow_compatibility_mode() -> tempfile.TemporaryDirectory[str] | None:
    """Configure cuFile to work without nvidia-fs, unless the machine or the user has a configuration.

    The configuration also keeps cuFile's log out of the current directory. Return the directory of the
    configuration, which is deleted when the process ends, or None if the machine or the user has a
    configuration.
    """
    if _CONFIGURATION_VARIABLE in os.environ or _SYSTEM_CONFIGURATION.exists():
        return None
    directory = tempfile.TemporaryDirectory(prefix="cudakit-cufile-")
    path = Path(directory.name) / "cufile.json"
    configuration = {
        "logging": {"dir": directory.name, "level": "ERROR"},
        "properties": {"allow_compat_mode": True},
    }
    path.write_text(json.dumps(configuration), encoding="utf-8")
    os.environ[_CONFIGURATION_VARIABLE] = str(path)
    return directory


def _import_cufile() -> Any:
    """Import the bindings of cuFile, and load the library. Raises MissingDependency."""
    try:
        from cuda.bindings import cufile  # type: ignore[import-untyped]

        cufile.get_version()
    except Exception as error:  # cuda-bindings raises its own types for a missing library
        raise MissingDependency("cuFile", purpose=_PURPOSE, requirement=_REQUIREMENT) from error
    return cufile
