"""Links and peer access between the GPUs of a machine, as NVML and CUDA report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from cudakit.core.devices.match import MatchedDevice
from cudakit.core.devices.result import Pair
from cudakit.gpu.api.facts import CudaView, Link, NvmlView
from cudakit.units import Unavailable

_OK = "ok"


def pairs(
    nvml: NvmlView | Unavailable, cuda: CudaView | Unavailable, matched: Sequence[MatchedDevice]
) -> tuple[Pair, ...]:
    """Return the connection of each pair of GPUs that NVML reports."""
    if isinstance(nvml, Unavailable):
        return ()
    links = {(link.first, link.second): link for link in nvml.links}
    gpus = {
        device.nvml.index: device
        for device in matched
        if device.nvml and device.nvml.parent is None
    }
    return tuple(
        _pair(links.get((first, second)) or _unknown_link(first, second), gpus, cuda)
        for first, second in combinations(sorted(gpus), 2)
    )


def _unknown_link(first: int, second: int) -> Link:
    unknown = Unavailable("NVML does not report it")
    return Link(first, second, unknown, unknown, unknown, unknown, unknown)


def _pair(link: Link, gpus: Mapping[int, MatchedDevice], cuda: CudaView | Unavailable) -> Pair:
    first_gpu, second_gpu = gpus[link.first], gpus[link.second]
    cuda_access = _is_bidirectional(cuda, first_gpu, second_gpu, "peer_access")
    return Pair(
        first=link.first,
        second=link.second,
        path=link.path,
        nvlinks=link.nvlinks,
        nvml_read=link.p2p_read,
        nvml_write=link.p2p_write,
        nvml_atomics=link.p2p_atomics,
        cuda_access=cuda_access,
        cuda_atomics=_is_bidirectional(cuda, first_gpu, second_gpu, "peer_atomics"),
        disagreement=_disagreement(link, cuda_access),
    )


def _is_bidirectional(
    cuda: CudaView | Unavailable, first: MatchedDevice, second: MatchedDevice, attribute: str
) -> bool | Unavailable:
    """Return whether a list of CUDA's view has a pair of devices in both directions."""
    if isinstance(cuda, Unavailable):
        return Unavailable("CUDA does not answer")
    indices = [gpu.cuda.index for gpu in (first, second) if gpu.cuda and not gpu.hidden]
    if len(indices) < 2:
        return Unavailable("not both devices are visible to CUDA")
    first_index, second_index = indices
    index_pairs = getattr(cuda, attribute)
    return (first_index, second_index) in index_pairs and (second_index, first_index) in index_pairs


def _disagreement(link: Link, cuda_access: bool | Unavailable) -> str | None:
    """Return a sentence if NVML and CUDA disagree on peer access, else None."""
    states = [link.p2p_read, link.p2p_write]
    is_unknown = any(isinstance(state, Unavailable) for state in states)
    if isinstance(cuda_access, Unavailable) or is_unknown:
        return None
    nvml_access = all(state == _OK for state in states)
    if nvml_access == cuda_access:
        return None
    gpus = f"NVML {link.first} and {link.second}"
    if nvml_access:
        return f"{gpus}: NVML reports peer access, CUDA does not"
    return f"{gpus}: CUDA reports peer access, NVML does not"
