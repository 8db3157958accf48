"""Allocators with expandable segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from allocator.device import MIB, Device
from allocator.virtual_device import VirtualDevice

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.torch_rules.settings import Settings

LIVE, FREE = "active_allocated", "inactive"
PAGE = 20 * MIB
SIDE = 11


def expandable_allocator(device: Device | None = None, **settings: Any) -> DeviceCachingAllocator:
    """Return an allocator with expandable_segments and the given settings."""
    return DeviceCachingAllocator(
        device or VirtualDevice(),
        Settings(expandable_segments=True, **settings),
        search_again=False,
    )


def set_expandable(allocator: DeviceCachingAllocator, *, on: bool) -> None:
    """Turn the setting expandable_segments on or off."""
    allocator.configure(replace(allocator.settings, expandable_segments=on))
