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
    handles = {index: handle for index, handle in gpus.items() if handle is not None}
    remote_ends = {index: _nvlink_ends(Reader(lib, handle)) for index, handle in handles.items()}
    buses = {index: _pci_address(Reader(lib, handle)) for index, handle in handles.items()}
    for first, second in combinations(sorted(handles), 2):
        reader, peer = Reader(lib, handles[first]), handles[second]
        read, write, nvlink, atomics = (
            _call_named(reader, "nvmlDeviceGetP2PStatus", P2P_STATES, peer, capability)
            for capability in _P2P_CAPABILITIES
        )
        count = _count_links_between(
            remote_ends[first], remote_ends[second], buses[first], buses[second]
        )
        over_nvlink = count if nvlink == P2P_STATES[0] else 0
        path = _call_named(reader, "nvmlDeviceGetTopologyCommonAncestor", PATHS, peer)
        yield Link(
            first=first,
            second=second,
            path=f"NV{over_nvlink}" if over_nvlink else path,
            nvlinks=over_nvlink,
            p2p_read=read,
            p2p_write=write,
            p2p_atomics=atomics,
        )


def _call_named(
    reader: Reader, function: str, names: Mapping[int, str], *arguments: Any
) -> str | Unavailable:
    """Call a function and return the name of its result."""
    result = reader.attempt(lambda: getattr(reader.lib, function)(reader.handle, *arguments))
    return result if isinstance(result, Unavailable) else name_from(names)(result)


def _pci_address(reader: Reader) -> str:
    info = reader.attempt(lambda: reader.lib.nvmlDeviceGetPciInfo(reader.handle))
    return "" if isinstance(info, Unavailable) else _text(info.busId)


def _nvlink_ends(reader: Reader) -> list[str]:
    """Return the remote end of each active NVLink: the PCI address of a GPU, or a switch."""
    remote_ends = []
    for link in range(reader.lib.NVML_NVLINK_MAX_LINKS):
        state = reader.attempt(partial(reader.lib.nvmlDeviceGetNvLinkState, reader.handle, link))
        if isinstance(state, Unavailable):
            break  # the GPU has no more links
        if state == _NVLINK_ACTIVE:
            remote_ends.append(_remote_end(reader, link))
    return remote_ends


def _remote_end(reader: Reader, link: int) -> str:
    lib, handle = reader.lib, reader.handle
    kind = reader.attempt(lambda: lib.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    if kind != lib.NVML_NVLINK_DEVICE_TYPE_GPU:
        return _SWITCH
    info = reader.attempt(lambda: lib.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
    return _SWITCH if isinstance(info, Unavailable) else _text(info.busId)


def _count_links_between(
    first: list[str], second: list[str], first_bus: str, second_bus: str
) -> int:
    """Return the number of NVLinks between two GPUs: direct ones, or else those that a switch can connect."""
    direct_links = min(first.count(second_bus), second.count(first_bus))
    return direct_links or min(first.count(_SWITCH), second.count(_SWITCH))


def _text(nvml_text: Any) -> str:
    return nvml_text.decode().lower() if isinstance(nvml_text, bytes) else str(nvml_text).lower()
