"""The results directory of a fleet: a folder per host, with a file per GPU.

``HOST/gpuN.json`` is the JSON document of ``cudakit bench suite --json`` on GPU N of the host: a result or an
error. ``HOST/host.json`` has the facts about the host; without it, the name of the folder is the host's name.
Each file appears complete or not at all, so the directory is readable at any time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cudakit.bench.fleet.analysis import NOT_MEASURED
from cudakit.bench.fleet.result import FleetGpu, FleetHost, HostFacts
from cudakit.bench.health import SuiteResult
from cudakit.bench.load import SUITE_FILE, load_suite
from cudakit.errors import EnvironmentUnusable, InputError, UsageError
from cudakit.input_files import ExpectedFile, check_schema, read_error, read_json
from cudakit.serialize import Mismatch, from_plain, to_plain
from cudakit.units import Unavailable

_HOST_FILE = "host.json"
_GPU_FILE = re.compile(r"gpu(\d{1,4})\.json")
_HINT = (
    "name a directory with HOST/gpuN.json files; cudakit bench suite -o DIR/HOST/gpuN.json writes one, and "
    "--ray auto --results DIR writes those of all GPUs of a Ray cluster"
)
_FACTS_FILE = ExpectedFile("a file with the facts about a host", _HINT)
# Characters of host names (RFC 1123) and addresses. Others are replaced in names of folders.
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9.:_-]")


class FleetRecords:
    """The files of a results directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def create(self) -> None:
        """Create the directory. Raises UsageError if files cannot be written to it."""
        hint = "name another directory with --results"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UsageError(f"{self.directory} is not a directory", hint=hint) from None
        except OSError as error:
            raise UsageError(
                f"cannot create {self.directory}: {error.strerror}", hint=hint
            ) from error
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write to {self.directory}", hint=hint)

    def write_host(self, facts: HostFacts) -> None:
        """Write the facts about a host."""
        self._write(self._host_directory(facts.name) / _HOST_FILE, dump_facts(facts))

    def write_suite(self, host: str, gpu_index: int, text: str) -> None:
        """Write the JSON document of a suite: a result or an error."""
        self._write(self._gpu_path(host, gpu_index), text)

    def write_error(self, host: str, gpu_index: int, message: str, hint: str) -> None:
        """Write the error of a GPU, in the form in which ``cudakit bench suite --json`` prints errors."""
        error = {"kind": "EnvironmentUnusable", "message": message, "hint": hint, "exit_code": 3}
        self._write(self._gpu_path(host, gpu_index), json.dumps({"error": error}) + "\n")

    def has_files(self) -> bool:
        """Return whether the directory has a file of a host."""
        return any(self.directory.glob("*/*.json"))

    def has_result(self, facts: HostFacts, gpu_index: int, *, quick: bool) -> bool:
        """Return whether a GPU has a complete result of the same suite, so that it need not be measured."""
        try:
            suite = load_suite(self._gpu_path(facts.name, gpu_index))
        except InputError:
            return False
        uuid, expected_uuid = _describe_gpu(gpu_index, suite).uuid, facts.gpu_uuid(gpu_index)
        is_same_gpu = not (uuid and expected_uuid) or uuid == expected_uuid
        is_same_suite = (suite.quick, suite.simulated) == (quick, facts.simulated)
        return is_same_gpu and is_same_suite and suite.bench.complete

    def read(self) -> tuple[FleetHost, ...]:
        """Return the hosts by name. Raises InputError for a directory without results."""
        try:
            folders = sorted(path for path in self.directory.iterdir() if path.is_dir())
        except NotADirectoryError:
            raise InputError(f"{self.directory} is not a directory", hint=_HINT) from None
        except OSError as error:
            raise read_error(self.directory, error, hint=_HINT) from None
        hosts = tuple(host for folder in folders for host in self._read_host(folder))
        if not hosts:
            raise InputError(f"{self.directory} contains no results of a fleet", hint=_HINT)
        return hosts

    def _read_host(self, folder: Path) -> Iterator[FleetHost]:
        """Yield the host of a folder, or nothing if the folder has no files of a host."""
        gpu_files = {
            int(match[1]): path
            for path in folder.iterdir()
            if (match := _GPU_FILE.fullmatch(path.name))
        }
        has_facts = (folder / _HOST_FILE).exists()
        if gpu_files or has_facts:
            facts = _read_facts(folder) if has_facts else HostFacts(folder.name)
            # The GPUs of a host that failed have no errors of their own.
            gpu_indices = sorted({*range(0 if facts.error else facts.gpu_count), *gpu_files})
            gpus = tuple(
                _read_gpu(index, gpu_files[index])
                if index in gpu_files
                else FleetGpu(index, "", "", "", "", "", NOT_MEASURED)
                for index in gpu_indices
            )
            yield FleetHost(facts, gpus)

    def _host_directory(self, host: str) -> Path:
        return self.directory / (_UNSAFE_CHARACTERS.sub("_", host).lstrip(".") or "_")

    def _gpu_path(self, host: str, gpu_index: int) -> Path:
        return self._host_directory(host) / f"gpu{gpu_index}.json"

    def _write(self, path: Path, text: str) -> None:
        temporary_path = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary_path.write_text(text, encoding="utf-8")
            temporary_path.replace(path)
        except OSError as error:
            raise EnvironmentUnusable(f"cannot write {path}: {error.strerror}") from error


def dump_facts(facts: HostFacts) -> str:
    """Return the facts about a host as a JSON document."""
    return json.dumps(to_plain(facts), indent=2) + "\n"


def parse_facts(document: object, source: str) -> HostFacts:
    """Return the facts about a host from a JSON value. Raises InputError, which names the source."""
    facts = check_schema(source, document, HostFacts.schema, _FACTS_FILE)
    try:
        return from_plain(HostFacts, facts)
    except Mismatch as mismatch:
        raise InputError(f"{source} is damaged: {mismatch}", hint=_HINT) from None


def _read_facts(folder: Path) -> HostFacts:
    """Return the facts of a host; if the file is damaged, they have an error."""
    path = folder / _HOST_FILE
    try:
        return parse_facts(read_json(path, _FACTS_FILE), str(path))
    except InputError as error:
        return HostFacts(folder.name, error=error.message, hint=error.hint)


def _read_gpu(index: int, path: Path) -> FleetGpu:
    """Return the GPU that a file describes: its suite result, or an error if it has one or is damaged."""
    try:
        return _parse_gpu(index, path)
    except InputError as error:
        return FleetGpu(index, "", "", "", error.message, error.hint, NOT_MEASURED)


def _parse_gpu(index: int, path: Path) -> FleetGpu:
    document = read_json(path, SUITE_FILE)
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict) and isinstance(document, dict) and "schema" not in document:
        message, hint = (str(error.get(name, "")) for name in ("message", "hint"))
        return FleetGpu(index, "", "", "", message or "unknown error", hint, NOT_MEASURED)
    suite = load_suite(path)
    return _describe_gpu(index, suite)


def _describe_gpu(index: int, suite: SuiteResult) -> FleetGpu:
    if not suite.bench.results:
        return FleetGpu(index, "", "", "", "", "", suite)
    environment = suite.bench.results[0].environment
    model, uuid, pci_bus_id = (
        "" if isinstance(fact, Unavailable) else fact
        for fact in (environment.gpu, environment.uuid, environment.pci_bus_id)
    )
    return FleetGpu(index, model, uuid, pci_bus_id, "", "", suite)
