"""The link of each pair of GPUs, as NVML reports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import combinations
from typing import Any

from cudakit.gpu.api.facts import Link
from cudakit.gpu.nvml.names import P2P_STATES, PATHS, name_from
from cudakit.gpu.nvml.reader import Reader
from cudakit.units import Unavailable

_NVLINK_ACTIVE = 1  # NVML_FEATURE_ENABLED
# nvmlGpuP2PCapsIndex_t (nvml.h); some of nvidia-ml-py's constants are not numbers.
_P2P_CAPABILITIES = range(4)  # read, write, NVLink, atomics
_SWITCH = "switch"


def links(lib: Any, gpus: Mapping[int, Any]) -> Iterator[Link]:
    """Yield the link of each pair of GPUs. ``gpus`` maps NVML indices to handles."""
    handle_by_gpu = {index: handle for index, handle in gpus.items() if handle is not None}
    remote_ends = {
        index: _nvlink_ends(Reader(lib, handle)) for index, handle in handle_by_gpu.items()
    }
    bus_by_index = {
        index: _pci_address(Reader(lib, handle)) for index, handle in handle_by_gpu.items()
    }
    for first_index, second_index in combinations(sorted(handle_by_gpu), 2):
        reader, peer = Reader(lib, handle_by_gpu[first_index]), handle_by_gpu[second_index]
        read, write, nvlink, atomics = (
            _call_named(reader, "nvmlDeviceGetP2PStatus", P2P_STATES, peer, p2p_capability)
            for p2p_capability in _P2P_CAPABILITIES
        )
        nvlink_count = _count_links_between(
            remote_ends[first_index],
            remote_ends[second_index],
            bus_by_index[first_index],
            bus_by_index[second_index],
        )
        active_nvlink_count = nvlink_count if nvlink == P2P_STATES[0] else 0
        path = _call_named(reader, "nvmlDeviceGetTopologyCommonAncestor", PATHS, peer)
        yield Link(
            first=first_index,
            second=second_index,
            path=f"NV{active_nvlink_count}" if active_nvlink_count else path,
            nvlinks=active_nvlink_count,
            p2p_read=read,
            p2p_write=write,
            p2p_atomics=atomics,
        )


def _call_named(
    reader: Reader, function: str, name_by_number: Mapping[int, str], *arguments: Any
) -> str | Unavailable:
    """Call a function and return the name of its result."""
    result = reader.attempt(lambda: getattr(reader.lib, function)(reader.handle, *arguments))
    return result if isinstance(result, Unavailable) else name_from(name_by_number)(result)


def _pci_address(reader: Reader) -> str:
    pci_info = reader.attempt(lambda: reader.lib.nvmlDeviceGetPciInfo(reader.handle))
    return "" if isinstance(pci_info, Unavailable) else _text(pci_info.busId)


def _nvlink_ends(reader: Reader) -> list[str]:
    """Return the remote end of each active NVLink: the PCI address of a GPU, or a switch."""
    remote_ends = []
    for link_index in range(reader.lib.NVML_NVLINK_MAX_LINKS):
        link_state = reader.attempt(
            partial(reader.lib.nvmlDeviceGetNvLinkState, reader.handle, link_index)
        )
        if isinstance(link_state, Unavailable):
            break  # the GPU has no more links
        if link_state == _NVLINK_ACTIVE:
            remote_ends.append(_remote_end(reader, link_index))
    return remote_ends


def _remote_end(reader: Reader, link_index: int) -> str:
    lib, handle = reader.lib, reader.handle
    device_type = reader.attempt(
        lambda: lib.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link_index)
    )
    if device_type != lib.NVML_NVLINK_DEVICE_TYPE_GPU:
        return _SWITCH
    pci_info = reader.attempt(lambda: lib.nvmlDeviceGetNvLinkRemotePciInfo(handle, link_index))
    return _SWITCH if isinstance(pci_info, Unavailable) else _text(pci_info.busId)


def _count_links_between(
    first_ends: list[str], second_ends: list[str], first_bus: str, second_bus: str
) -> int:
    """Return the number of NVLinks between two GPUs: direct ones, or else those that a switch can connect."""
    direct_link_count = min(first_ends.count(second_bus), second_ends.count(first_bus))
    return direct_link_count or min(first_ends.count(_SWITCH), second_ends.count(_SWITCH))


def _text(nvml_text: Any) -> str:
    return nvml_text.decode().lower() if isinstance(nvml_text, bytes) else str(nvml_text).lower()
