"""Present links and peer access between GPUs as matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from cudakit.devices.present.fields import as_text
from cudakit.devices.result import Device, DevicesResult, Pair
from cudakit.report.document import Column, Node, Note, Table, Text, Value
from cudakit.units import Unavailable

_PATH_MEANINGS = {
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the PCIe host bridge",
    "NODE": "several PCIe host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
# Fields of a GPU that the matrix of links shows in its last columns.
_LOCALITY_COLUMNS = {"cpu_affinity": Column("CPUs"), "host_numa_id": Column("NUMA", "number")}
_HINT = (
    "possible causes: an IOMMU, PCIe access control (ACS), or a container or virtual machine that "
    "hides the topology; measure the copy before you rely on it"
)


def topology_nodes(result: DevicesResult) -> Iterator[Node]:
    """Yield matrices of links and peer access, and a note for each pair on which NVML and CUDA disagree."""
    gpus = [device for device in result.devices if device.parent is None]
    if len(gpus) < 2 or not result.pairs:
        yield Note("info", "no links: the report has fewer than two GPUs")
        return
    pair_by_gpus = {(gpu_pair.first, gpu_pair.second): gpu_pair for gpu_pair in result.pairs}
    yield _matrix("link", gpus, pair_by_gpus, lambda gpu_pair: as_text(gpu_pair.path))
    yield _matrix("peer access", gpus, pair_by_gpus, _access_text)
    for gpu_pair in result.pairs:
        if gpu_pair.disagreement:
            yield Note("warn", gpu_pair.disagreement, remedies=(_HINT,))


def _matrix(
    title: str,
    gpus: Sequence[Device],
    pair_by_gpus: Mapping[tuple[int, int], Pair],
    pair_value: Callable[[Pair], Value],
) -> Table:
    locality = _LOCALITY_COLUMNS if title == "link" else {}
    table_rows = tuple(
        (
            Text(_gpu_name(row_gpu)),
            *(_pair_cell(row_gpu, column_gpu, pair_by_gpus, pair_value) for column_gpu in gpus),
            *(as_text(row_gpu.field(name)) for name in locality),
        )
        for row_gpu in gpus
    )
    columns = (Column(title), *(Column(_gpu_name(gpu)) for gpu in gpus), *locality.values())
    return Table(columns, table_rows, caption=_legend(pair_by_gpus) if title == "link" else "")


def _pair_cell(
    row_gpu: Device,
    column_gpu: Device,
    pair_by_gpus: Mapping[tuple[int, int], Pair],
    pair_value: Callable[[Pair], Value],
) -> Value:
    if row_gpu is column_gpu:
        return Text("-")
    first_index, second_index = sorted((_nvml_index(row_gpu), _nvml_index(column_gpu)))
    gpu_pair = pair_by_gpus.get((first_index, second_index))
    return pair_value(gpu_pair) if gpu_pair else Unavailable("NVML does not report it")


def _nvml_index(device: Device) -> int:
    return device.nvml_index if isinstance(device.nvml_index, int) else -1


def _gpu_name(device: Device) -> str:
    cuda_name = f"cuda:{device.cuda_index}" if isinstance(device.cuda_index, int) else ""
    return " ".join(filter(None, (cuda_name, f"nvml:{device.nvml_index}")))


def _access_text(gpu_pair: Pair) -> Value:
    """Return whether there is peer access: one answer if NVML and CUDA agree, else both answers."""
    nvml_access, cuda_access = _nvml_access(gpu_pair), gpu_pair.cuda_access
    if isinstance(cuda_access, Unavailable):
        if isinstance(nvml_access, Unavailable):
            return nvml_access
        return Text(f"{_yes_or_no(nvml_access)} (NVML)")
    if isinstance(nvml_access, Unavailable):
        return Text(f"{_yes_or_no(cuda_access)} (CUDA)")
    if nvml_access == cuda_access:
        atomics_text = " + atomics" if gpu_pair.cuda_atomics is True else ""
        return Text(_yes_or_no(nvml_access) + atomics_text)
    return Text(f"NVML {_yes_or_no(nvml_access)}, CUDA {_yes_or_no(cuda_access)}")


def _nvml_access(gpu_pair: Pair) -> bool | Unavailable:
    access_states = (gpu_pair.nvml_read, gpu_pair.nvml_write)
    unknown_states = [state for state in access_states if isinstance(state, Unavailable)]
    return unknown_states[0] if unknown_states else all(state == "ok" for state in access_states)


def _yes_or_no(is_yes: bool) -> str:
    return "yes" if is_yes else "no"


def _legend(pair_by_gpus: Mapping[tuple[int, int], Pair]) -> str:
    """Return the meaning of the abbreviations in the matrix."""
    connections = sorted(
        {gpu_pair.path for gpu_pair in pair_by_gpus.values() if isinstance(gpu_pair.path, str)}
    )
    return "; ".join(f"{connection}: {_path_meaning(connection)}" for connection in connections)


def _path_meaning(connection: str) -> str:
    return (
        f"{connection[2:]} NVLinks"
        if connection.startswith("NV")
        else _PATH_MEANINGS.get(connection, "unknown")
    )
