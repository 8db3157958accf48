"""What is around a device that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cudakit.gpu.api.facts import DeviceFacts
from cudakit.units import Unavailable

_NOT_ASKED = Unavailable("nobody was there to ask")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a device cannot say of itself: who else is there, and what is around it."""

    versions: Mapping[str, str] = field(default_factory=dict)  # driver, CUDA, libraries, cudakit
    management: DeviceFacts | None = None  # what NVML knows of the device
    other_processes: int | Unavailable = _NOT_ASKED  # on the GPU
    host: Mapping[str, str] = field(default_factory=dict)  # CPU, NUMA node, container
    variables: Mapping[str, str] = field(default_factory=dict)  # the process environment
    host_free_bytes: int | Unavailable = _NOT_ASKED  # memory that the host can still give
    command: tuple[str, ...] = ()  # what was called
