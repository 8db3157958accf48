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
    """Return each pair of the GPUs that NVML reports."""
    if isinstance(nvml, Unavailable):
        return ()
    links = {(link.first, link.second): link for link in nvml.links}
    gpus = {
        device.nvml.index: device
        for device in matched
        if device.nvml and device.nvml.parent is None
    }
    return tuple(
        _pair(links.get((first, second)) or _unknown(first, second), gpus, cuda)
        for first, second in combinations(sorted(gpus), 2)
    )


def _unknown(first: int, second: int) -> Link:
    absent = Unavailable("NVML does not report it")
    return Link(first, second, absent, absent, absent, absent, absent)


def _pair(link: Link, gpus: Mapping[int, MatchedDevice], cuda: CudaView | Unavailable) -> Pair:
    left, right = gpus[link.first], gpus[link.second]
    access = _is_bidirectional(cuda, left, right, "peer_access")
    return Pair(
        first=link.first,
        second=link.second,
        path=link.path,
        nvlinks=link.nvlinks,
        nvml_read=link.p2p_read,
        nvml_write=link.p2p_write,
        nvml_atomics=link.p2p_atomics,
        cuda_access=access,
        cuda_atomics=_is_bidirectional(cuda, left, right, "peer_atomics"),
        disagreement=_disagreement(link, access),
    )


def _is_bidirectional(
    cuda: CudaView | Unavailable, left: MatchedDevice, right: MatchedDevice, list_name: str
) -> bool | Unavailable:
    """Return whether CUDA lists a pair in both directions."""
    if isinstance(cuda, Unavailable):
        return Unavailable("CUDA does not answer")
    ordinals = [each.cuda.index for each in (left, right) if each.cuda and not each.hidden]
    if len(ordinals) < 2:
        return Unavailable("not both devices are visible to CUDA")
    first, second = ordinals
    listed = getattr(cuda, list_name)
    return (first, second) in listed and (second, first) in listed


def _disagreement(link: Link, access: bool | Unavailable) -> str | None:
    states = [link.p2p_read, link.p2p_write]
    if isinstance(access, Unavailable) or any(isinstance(state, Unavailable) for state in states):
        return None
    nvml = all(state == _OK for state in states)
    if nvml == access:
        return None
    name = f"NVML {link.first} and {link.second}"
    if nvml:
        return f"{name}: NVML reports peer access, CUDA does not"
    return f"{name}: CUDA reports peer access, NVML does not"
