"""Memory at the addresses that another allocator got, on whose order best fit depends."""

from __future__ import annotations

from collections import deque
from typing import Any

from allocator_scenarios.canonical import Addresses


class Placed:
    """An upstream whose segments have given addresses, in turn; nothing may read or write there.

    Every call is made, with what the device gave itself.
    """

    def __init__(self, upstream: Any, addresses: Addresses) -> None:
        self._upstream = upstream
        self._left = deque(addresses.segments)
        self._given: dict[int, int] = {}
        self.pages = PlacedPages(upstream.pages, addresses)

    def malloc(self, size_bytes: int, stream: int) -> int:
        own: int = self._upstream.malloc(size_bytes, stream)
        address = self._left.popleft() if self._left else own
        self._given[address] = own
        return address

    def free(self, ptr: int) -> None:
        self._upstream.free(self._given[ptr])
        del self._given[ptr]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)


class PlacedPages:
    """Virtual memory whose reservations have given addresses."""

    def __init__(self, pages: Any, addresses: Addresses) -> None:
        self._pages = pages
        self._left = deque(addresses.reservations)
        self._given: dict[int, tuple[int, int]] = {}  # begin: the size, and where it is

    def reserve(self, size_bytes: int) -> int:
        own: int = self._pages.reserve(size_bytes)
        address = self._left.popleft() if self._left else own
        self._given[address] = size_bytes, own
        return address

    def unreserve(self, ptr: int, size_bytes: int) -> None:
        self._pages.unreserve(self._own(ptr), size_bytes)
        del self._given[ptr]

    def map(self, ptr: int, page_bytes: int, count: int) -> None:
        self._pages.map(self._own(ptr), page_bytes, count)

    def unmap(self, ptr: int, size_bytes: int) -> None:
        self._pages.unmap(self._own(ptr), size_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pages, name)

    def _own(self, ptr: int) -> int:
        for begin, (size, own) in self._given.items():
            if begin <= ptr < begin + size:
                return own + ptr - begin
        raise LookupError(f"nothing is reserved at {ptr:#x}")
