"""Address ranges that expandable segments reserve, by stream class."""

from __future__ import annotations

import pytest
from allocator.device import GIB, MIB
from allocator.expandable_allocator import PAGE, SIDE, expandable_allocator, set_expandable
from allocator.virtual_device import VirtualDevice
from hypothesis import given
from hypothesis import strategies as st

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.expandable import AddressSpace
from cudakit.allocator.oom import OutOfMemory
from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY
from cudakit.torch_rules.setting_keys import Reserve
from cudakit.torch_rules.settings import parse_config

BY_CLASS = (("serving", Reserve(value=0.25)), ("tiny", Reserve(value=1.0, unit="GiB")))


def pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def test_stream_class_selects_the_reserved_address_range() -> None:
    device = VirtualDevice()  # a device with 16 GiB of memory
    allocator = expandable_allocator(device, expandable_segments_reserve_by_class=BY_CLASS)
    allocator.set_reserve_class(SIDE, "serving")
    allocator.set_reserve_class(SIDE + 1, "tiny")
    for stream in (0, SIDE, SIDE + 1):
        allocator.alloc(30 * MIB, stream)

    assert list(device.reserved.values()) == [pages(18 * GIB), pages(4 * GIB), pages(GIB)]
    assert allocator.address_space() == AddressSpace(3, sum(device.reserved.values()))


def test_unlisted_stream_class_uses_the_default_reserve() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(
        device,
        expandable_segments_reserve=Reserve(value=0.5),
        expandable_segments_reserve_by_class=BY_CLASS,
    )
    allocator.set_reserve_class(SIDE, "training")
    allocator.alloc(30 * MIB, SIDE)

    assert list(device.reserved.values()) == [pages(8 * GIB)]


def test_stream_class_applies_to_new_segments_and_can_be_removed() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device, expandable_segments_reserve_by_class=BY_CLASS)
    allocator.set_reserve_class(LEGACY, "tiny")
    assert allocator.reserve_class(0) == "tiny"
    first = allocator.alloc(30 * MIB)
    allocator.set_reserve_class(0, "")
    assert allocator.reserve_class(LEGACY) == ""
    second = allocator.alloc(100 * MIB)
    assert second == first + 30 * MIB, "there are addresses left"
    allocator.alloc(2 * GIB)

    assert list(device.reserved.values()) == [pages(GIB), pages(18 * GIB)]


def test_stream_class_can_be_set_before_expandable_segments_are_on() -> None:
    device = VirtualDevice()
    allocator = DeviceCachingAllocator(device)
    allocator.set_reserve_class(SIDE, "tiny")
    assert allocator.address_space() == AddressSpace(0, 0)
    allocator.configure(
        parse_config("expandable_segments:True,expandable_segments_reserve_by_class:[tiny:1G]")
    )
    allocator.alloc(30 * MIB, SIDE)

    assert list(device.reserved.values()) == [pages(GIB)]


def test_request_beyond_its_reserve_names_the_setting_to_raise() -> None:
    device = VirtualDevice()
    allocator = expandable_allocator(device, expandable_segments_reserve_by_class=BY_CLASS)
    allocator.set_reserve_class(SIDE, "tiny")
    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(2 * GIB, SIDE)

    assert "an expandable segment of class tiny reserves" in caught.value.hint
    assert "expandable_segments_reserve_by_class" in caught.value.hint
    assert allocator.statistics()["num_ooms"] == 1
    set_expandable(allocator, on=False)
    assert allocator.alloc(2 * GIB, SIDE)


@pytest.mark.parametrize("name", ["a b", "a,b", "[", "a:1"])
def test_invalid_class_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not a valid name"):
        expandable_allocator().set_reserve_class(SIDE, name)


@given(
    classes=st.lists(st.sampled_from(["", "serving", "tiny", "unknown"]), min_size=1, max_size=6),
    shares=st.tuples(*[st.floats(0.01, 1.125)] * 3),
    request_bytes=st.integers(1, 3 * GIB),
)
def test_reserved_addresses_fit_a_request_and_follow_the_setting(
    classes: list[str], shares: tuple[float, float, float], request_bytes: int
) -> None:
    device = VirtualDevice(64 * GIB)
    by_class = dict(zip(("serving", "tiny"), shares[1:], strict=True))
    allocator = expandable_allocator(
        device,
        expandable_segments_reserve=Reserve(value=shares[0]),
        expandable_segments_reserve_by_class=tuple(
            (name, Reserve(value=share)) for name, share in by_class.items()
        ),
    )
    for stream, name in enumerate(classes, start=SIDE):
        count_before = len(device.reserved)
        allocator.set_reserve_class(stream, name)
        page_bytes = PAGE if request_bytes > MIB else 2 * MIB
        expected_bytes = (
            -(-int(by_class.get(name, shares[0]) * 64 * GIB) // page_bytes) * page_bytes
        )
        if request_bytes > expected_bytes:
            with pytest.raises(OutOfMemory):
                allocator.alloc(request_bytes, stream)
            assert len(device.reserved) == count_before
        else:
            allocator.alloc(request_bytes, stream)
            assert list(device.reserved.values())[count_before:] == [expected_bytes]
    assert allocator.address_space().reserved_bytes == sum(device.reserved.values())
