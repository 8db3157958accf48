"""Links and peer access between the GPUs of a machine, as NVML and CUDA report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from cudakit.devices.match import MatchedDevice
from cudakit.devices.result import Pair
from cudakit.gpu.api.facts import CudaView, Link, NvmlView
from cudakit.units import Unavailable

_OK_STATUS = "ok"


def device_pairs(
    nvml: NvmlView | Unavailable,
    cuda: CudaView | Unavailable,
    matched_devices: Sequence[MatchedDevice],
) -> tuple[Pair, ...]:
    """Return the connection of each pair of GPUs that NVML reports."""
    if isinstance(nvml, Unavailable):
        return ()
    link_by_gpus = {(link.first, link.second): link for link in nvml.links}
    gpu_by_index = {
        device.nvml.index: device
        for device in matched_devices
        if device.nvml and device.nvml.parent is None
    }
    return tuple(
        _device_pair(
            link_by_gpus.get((first_index, second_index))
            or _unknown_link(first_index, second_index),
            gpu_by_index,
            cuda,
        )
        for first_index, second_index in combinations(sorted(gpu_by_index), 2)
    )


def _unknown_link(first_index: int, second_index: int) -> Link:
    not_reported = Unavailable("NVML does not report it")
    return Link(
        first_index,
        second_index,
        not_reported,
        not_reported,
        not_reported,
        not_reported,
        not_reported,
    )


def _device_pair(
    link: Link, gpu_by_index: Mapping[int, MatchedDevice], cuda: CudaView | Unavailable
) -> Pair:
    first_gpu, second_gpu = gpu_by_index[link.first], gpu_by_index[link.second]
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
    cuda: CudaView | Unavailable,
    first_gpu: MatchedDevice,
    second_gpu: MatchedDevice,
    attribute: str,
) -> bool | Unavailable:
    """Return whether CUDA reports an attribute, such as "peer_access", for both directions of a pair."""
    if isinstance(cuda, Unavailable):
        return Unavailable("CUDA does not answer")
    indices = [
        matched_gpu.cuda.index
        for matched_gpu in (first_gpu, second_gpu)
        if matched_gpu.cuda and not matched_gpu.is_hidden
    ]
    if len(indices) < 2:
        return Unavailable("not both devices are visible to CUDA")
    first_index, second_index = indices
    index_pairs = getattr(cuda, attribute)
    return (first_index, second_index) in index_pairs and (second_index, first_index) in index_pairs


def _disagreement(link: Link, cuda_access: bool | Unavailable) -> str | None:
    """Return a sentence if NVML and CUDA disagree on peer access, else None."""
    access_states = [link.p2p_read, link.p2p_write]
    is_unknown = any(isinstance(state, Unavailable) for state in access_states)
    if isinstance(cuda_access, Unavailable) or is_unknown:
        return None
    nvml_access = all(state == _OK_STATUS for state in access_states)
    if nvml_access == cuda_access:
        return None
    gpus_text = f"NVML {link.first} and {link.second}"
    if nvml_access:
        return f"{gpus_text}: NVML reports peer access, CUDA does not"
    return f"{gpus_text}: CUDA reports peer access, NVML does not"
