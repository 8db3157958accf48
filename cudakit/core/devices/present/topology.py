"""Links and peer access between GPUs, as matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from cudakit.core.devices.present.fields import text_value
from cudakit.core.devices.result import Device, DevicesResult, Pair
from cudakit.document import Column, Node, Note, Table, Text, Value
from cudakit.units import Unavailable

_WORDS = {
    "PIX": "one PCIe bridge at most",
    "PXB": "several PCIe bridges",
    "PHB": "the PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "between NUMA nodes",
}
_NEAR = {"cpu_affinity": Column("CPUs"), "host_numa_id": Column("NUMA", "number")}
_HINT = (
    "an IOMMU or PCIe access control (ACS) in the way, or a container or virtual machine that "
    "hides the topology; try it before you rely on it"
)


def topology(result: DevicesResult) -> Iterator[Node]:
    """Return matrices of links and peer access, and notes where NVML and CUDA disagree."""
    gpus = [device for device in result.devices if device.parent is None]
    if len(gpus) < 2 or not result.pairs:
        yield Note("info", "there is only one GPU: it has nobody to reach")
        return
    pairs = {(pair.first, pair.second): pair for pair in result.pairs}
    yield _matrix("link", gpus, pairs, lambda pair: text_value(pair.path))
    yield _matrix("peer access", gpus, pairs, _access)
    for pair in result.pairs:
        if pair.disagreement:
            yield Note("warn", pair.disagreement, remedies=(_HINT,))


def _matrix(
    what: str,
    gpus: Sequence[Device],
    pairs: Mapping[tuple[int, int], Pair],
    cell: Callable[[Pair], Value],
) -> Table:
    near = _NEAR if what == "link" else {}
    rows = tuple(
        (
            Text(_name(one)),
            *(_cell(one, other, pairs, cell) for other in gpus),
            *(text_value(one.field(name)) for name in near),
        )
        for one in gpus
    )
    columns = (Column(what), *(Column(_name(gpu)) for gpu in gpus), *near.values())
    return Table(columns, rows, caption=_legend(pairs) if what == "link" else "")


def _cell(
    one: Device,
    other: Device,
    pairs: Mapping[tuple[int, int], Pair],
    cell: Callable[[Pair], Value],
) -> Value:
    if one is other:
        return Text("-")
    first, second = sorted((_number(one), _number(other)))
    pair = pairs.get((first, second))
    return cell(pair) if pair else Unavailable("NVML does not say")


def _number(device: Device) -> int:
    return device.nvml_index if isinstance(device.nvml_index, int) else -1


def _name(device: Device) -> str:
    cuda = f"cuda:{device.cuda_index}" if isinstance(device.cuda_index, int) else ""
    return " ".join(filter(None, (cuda, f"nvml:{device.nvml_index}")))


def _access(pair: Pair) -> Value:
    """Return one answer if NVML and CUDA agree, else both."""
    nvml = _nvml_access(pair)
    if isinstance(pair.cuda_access, Unavailable):
        return nvml if isinstance(nvml, Unavailable) else Text(f"{_yes(nvml)} (NVML)")
    if isinstance(nvml, Unavailable):
        return Text(f"{_yes(pair.cuda_access)} (CUDA)")
    if nvml == pair.cuda_access:
        atomics = " + atomics" if pair.cuda_atomics is True else ""
        return Text(_yes(nvml) + atomics)
    return Text(f"NVML {_yes(nvml)}, CUDA {_yes(pair.cuda_access)}")


def _nvml_access(pair: Pair) -> bool | Unavailable:
    states = (pair.nvml_read, pair.nvml_write)
    unknown = [state for state in states if isinstance(state, Unavailable)]
    return unknown[0] if unknown else all(state == "ok" for state in states)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _legend(pairs: Mapping[tuple[int, int], Pair]) -> str:
    """Explain the abbreviations in the matrix."""
    paths = sorted({pair.path for pair in pairs.values() if isinstance(pair.path, str)})
    return "; ".join(f"{path}: {_meaning(path)}" for path in paths)


def _meaning(path: str) -> str:
    return f"{path[2:]} NVLinks" if path.startswith("NV") else _WORDS.get(path, "unknown")
