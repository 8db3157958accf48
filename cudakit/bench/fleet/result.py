"""The result of a fleet: the suite result of each GPU, and the GPUs, links and hosts that are slow.

The order of fields is the order of JSON keys.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from cudakit.bench.health import SuiteResult
from cudakit.bench.labels import Axis
from cudakit.bench.load import SUITE_FILE, load_suite
from cudakit.errors import EnvironmentUnusable, InputError, UsageError
from cudakit.input_files import ExpectedFile, check_schema, read_error, read_json
from cudakit.serialize import Mismatch, from_plain, to_plain
from cudakit.units import Unavailable

SubjectKind: TypeAlias = Literal["host", "gpu", "link"]
NOT_MEASURED = Unavailable("not measured")

FindingKind: TypeAlias = Literal["slower", "failed", "wrong-gpu", "unhealthy"]


@dataclass(frozen=True, slots=True)
class HostLink:
    """The connection of two GPUs of a host, as NVML reports it."""

    first_uuid: str  # UUID of one GPU.
    second_uuid: str  # UUID of the other GPU.
    path: str  # Topology as nvidia-smi abbreviates it: "NV18", "PIX", "SYS".


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts about one host; the file host.json of a results directory."""

    schema: ClassVar[str] = "cudakit.fleet-host/1"
    name: str  # Name of the host.
    address: str = ""  # Address of the host in the Ray cluster; "" if unknown.
    gpu_count: int = 0  # Number of GPUs that the host offers to Ray; 0 if unknown.
    versions: Mapping[str, str] = field(
        default_factory=dict
    )  # Versions of cudakit, Python and Ray.
    simulated: bool = False  # Whether the GPUs are simulated.
    links: tuple[HostLink, ...] = ()  # Connections between the GPUs; empty if unknown.
    # UUIDs of the GPUs by CUDA device index, as CUDA reports them; empty if unknown.
    gpu_uuids: tuple[str, ...] = ()
    error: str = ""  # Reason why the host could not be measured; "" if it could.
    hint: str = ""  # Remedy for ``error``.

    def gpu_uuid(self, gpu_index: int) -> str:
        """Return the UUID of the GPU with a CUDA device index; "" if unknown."""
        return self.gpu_uuids[gpu_index] if gpu_index < len(self.gpu_uuids) else ""


@dataclass(frozen=True, slots=True)
class FleetGpu:
    """One GPU of a host, with the result of its suite."""

    index: int  # CUDA device index on the host.
    model: str = ""  # Name of the GPU model; "" if unknown.
    uuid: str = ""  # UUID of the GPU; "" if unknown.
    pci_bus_id: str = ""  # PCI address of the GPU; "" if unknown.
    error: str = ""  # Reason why the measurement failed; "" if it did not fail.
    hint: str = ""  # Remedy for ``error``.
    # The result of cudakit bench suite, with all samples; null for a GPU without result.
    suite: SuiteResult | Unavailable = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class FleetHost:
    """One host with its GPUs."""

    facts: HostFacts  # Facts about the host.
    gpus: tuple[FleetGpu, ...]  # GPUs of the host by index.

    @property
    def name(self) -> str:
        return self.facts.name


@dataclass(frozen=True, slots=True)
class Subject:
    """A host, a GPU, or a link of a GPU, to which a figure belongs."""

    kind: SubjectKind  # Kind of the subject: "host", "gpu" or "link".
    host: str  # Name of the host.
    gpu: int | None = None  # CUDA index of the GPU; null for a host.
    peer: int | None = None  # CUDA index of the second GPU of a link; null for a link to the host.

    def __str__(self) -> str:
        if self.kind == "host":
            return self.host
        if self.kind == "gpu":
            return f"{self.host} GPU {self.gpu}"
        link_end = "host" if self.peer is None else f"GPU {self.peer}"
        return f"{self.host} link GPU {self.gpu}-{link_end}"


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """One figure of a subject, compared with the same figure of its peers."""

    subject: Subject  # Subject of the figure.
    figure: str  # Name of the figure: "copy h2d".
    axes: Mapping[str, Axis]  # Axes of the figure's case.
    group: str  # Common property of the peers: GPU model, and topology of a link.
    unit: str  # Unit of the figure: "FLOP/s", "OP/s", "B/s", or "s".
    value: float  # Figure of the subject in ``unit``; for a host, the median over its GPUs.
    # 95% CI of the figure; null for a median of several figures.
    ci95: tuple[float, float] | Unavailable
    peer_count: int = 0  # Number of peers.
    peer_median: float = 0.0  # Median of the peers in ``unit``.
    peer_mad: float = 0.0  # Median absolute deviation of the peers in ``unit``.
    limit: float = 0.0  # Worst value that is not slower than the peers, in ``unit``.
    of_peers: float = 1.0  # Speed relative to the peers' median: 0.75 is 25% slower.
    # Whether the value is worse than the limit, and its CI worse than the peers' median.
    is_slow: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect of the fleet: a subject that is slower than its peers, failed, or is unhealthy.

    The kind "wrong-gpu" is a result of another GPU than the subject.
    """

    kind: FindingKind  # Kind of the finding.
    subject: Subject  # Host, GPU or link that the finding is about.
    text: str  # Sentence without capital letter and full stop.
    hint: str  # Remedy; "" if none is known.
    slow_figures: tuple[PeerComparison, ...] = ()  # Figures that are slow, the slowest first.
    # Conditions of the subject that are likely causes, or that differ from those of its peers.
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The result of ``cudakit bench suite`` on a fleet of GPUs."""

    schema: ClassVar[str] = "cudakit.fleet/1"
    simulated: bool  # Whether simulated devices did the work.
    complete: (
        bool  # False if GPUs have neither a result nor an error, because the run was interrupted.
    )
    findings: tuple[Finding, ...]  # Hosts, GPUs and links with defects.
    warnings: tuple[str, ...]  # Reasons to doubt the comparisons.
    comparisons: tuple[PeerComparison, ...]  # All figures that have peers.
    hosts: tuple[FleetHost, ...]  # Hosts with the suite results of their GPUs.


# --- The results directory of a fleet: a folder per host, with a file per GPU ----------------------
#
# ``HOST/gpuN.json`` is the JSON document of ``cudakit bench suite --json`` on GPU N of the host: a result or
# an error. ``HOST/host.json`` has the facts about the host; without it, the folder has the name of the host.
# Each file appears complete or not at all, so the directory is readable at any time.

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
        self._write(self._path(facts.name, _HOST_FILE), dump_facts(facts))

    def write_suite(self, host: str, gpu_index: int, text: str) -> None:
        """Write the JSON document of a suite: a result or an error."""
        self._write(self._path(host, f"gpu{gpu_index}.json"), text)

    def write_error(self, host: str, gpu_index: int, message: str, hint: str) -> None:
        """Write the error of a GPU, in the form in which ``cudakit bench suite --json`` prints errors."""
        error = {"kind": "EnvironmentUnusable", "message": message, "hint": hint, "exit_code": 3}
        self.write_suite(host, gpu_index, json.dumps({"error": error}) + "\n")

    def has_files(self) -> bool:
        return any(self.directory.glob("*/*.json"))

    def has_result(self, facts: HostFacts, gpu_index: int, *, quick: bool) -> bool:
        """Return whether a GPU has a complete result of the same suite, so that it need not be measured."""
        gpu = _read_gpu(gpu_index, self._path(facts.name, f"gpu{gpu_index}.json"))
        expected_uuid = facts.gpu_uuid(gpu_index)
        return (
            isinstance(gpu.suite, SuiteResult)
            and gpu.suite.bench.complete
            and (gpu.suite.quick, gpu.suite.simulated) == (quick, facts.simulated)
            and (not (gpu.uuid and expected_uuid) or gpu.uuid == expected_uuid)
        )

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
        path = folder / _HOST_FILE
        if gpu_files or path.exists():
            facts = HostFacts(folder.name)
            try:
                if path.exists():
                    facts = parse_facts(read_json(path, _FACTS_FILE), str(path))
            except InputError as error:
                facts = replace(facts, error=error.message, hint=error.hint)
            # The GPUs of a host that failed have no errors of their own.
            gpu_indices = sorted({*range(0 if facts.error else facts.gpu_count), *gpu_files})
            gpus = tuple(
                _read_gpu(index, gpu_files[index]) if index in gpu_files else FleetGpu(index)
                for index in gpu_indices
            )
            yield FleetHost(facts, gpus)

    def _path(self, host: str, name: str) -> Path:
        return self.directory / (_UNSAFE_CHARACTERS.sub("_", host).lstrip(".") or "_") / name

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


def _read_gpu(index: int, path: Path) -> FleetGpu:
    """Return the GPU of a file, with the suite result or error in it; a damaged file is an error."""
    try:
        document = read_json(path, SUITE_FILE)
        error = document.get("error") if isinstance(document, dict) else None
        if isinstance(document, dict) and isinstance(error, dict) and "schema" not in document:
            message = str(error.get("message") or "unknown error")
            return FleetGpu(index, error=message, hint=str(error.get("hint", "")))
        suite = load_suite(path)
    except InputError as failure:
        return FleetGpu(index, error=failure.message, hint=failure.hint)
    if not suite.bench.results:
        return FleetGpu(index, suite=suite)
    environment = suite.bench.results[0].environment
    facts = (environment.gpu, environment.uuid, environment.pci_bus_id)
    model, uuid, pci_bus_id = ("" if isinstance(fact, Unavailable) else fact for fact in facts)
    return FleetGpu(index, model, uuid, pci_bus_id, suite=suite)
