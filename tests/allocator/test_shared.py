"""The text of SharedMemory, and invalid texts."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.allocator.ipc import SharedMemory
from cudakit.errors import InputError
from cudakit.gpu.api import HANDLE_BYTES, DescriptorHandle, FabricHandle, ProcessId

PAGE = 2 << 20
NUMBERS = st.integers(0, (1 << 63) - 1)
PROCESSES = st.builds(ProcessId, st.integers(1, 1 << 22), NUMBERS)
BYTES = st.binary(min_size=HANDLE_BYTES, max_size=HANDLE_BYTES)


@st.composite
def memory(draw: st.DrawFn) -> SharedMemory:
    process, device = draw(PROCESSES), draw(st.text(max_size=40))
    size, offset = draw(st.integers(1, PAGE // 2)), draw(st.integers(0, PAGE // 2))
    kind = draw(st.sampled_from(("segment", "fabric", "descriptor")))
    if kind == "segment":
        return SharedMemory(size, offset, device, process, 0, (draw(BYTES),))
    descriptors = st.builds(
        DescriptorHandle, st.just(process), st.integers(0, 1 << 20), st.integers(1, 10**18)
    )
    any_handle = st.builds(FabricHandle, BYTES) if kind == "fabric" else descriptors
    handles = tuple(draw(st.lists(any_handle, min_size=1, max_size=4)))
    return SharedMemory(size, offset, device, process, PAGE, handles)


@given(memory())
def test_shared_memory_survives_text_and_pickle(shared: SharedMemory) -> None:
    assert SharedMemory.from_text(shared.as_text()) == shared
    assert pickle.loads(pickle.dumps(shared)) == shared  # noqa: S301  written right here


def form(**changed: Any) -> str:
    process = ProcessId(17, 4)
    shared = SharedMemory(100, 0, "GPU-0", process, PAGE, (DescriptorHandle(process, 7, 1),))
    return json.dumps({**json.loads(shared.as_text()), **changed})


def test_unknown_version_of_the_text_is_named() -> None:
    with pytest.raises(
        InputError, match=r"reads 'cudakit\.shared/1', not 'cudakit\.shared/2'"
    ) as caught:
        SharedMemory.from_text(form(schema="cudakit.shared/2"))
    assert "same version" in caught.value.hint


SEGMENT = "ipc:" + "00" * HANDLE_BYTES


@pytest.mark.parametrize(
    "changed",
    [
        {"size_bytes": -1},
        {"size_bytes": 0},
        {"size_bytes": 1.5},
        {"size_bytes": True},
        {"size_bytes": 1 << 63},
        {"offset_bytes": None},
        {"offset_bytes": PAGE - 99},
        {"device": 3},
        {"pid": "17"},
        {"pid": 1 << 31},
        {"started": -4},
        {"page_bytes": 1 << 62, "handles": ["fd:7:1", "fd:8:2"]},
        {"page_bytes": 0},
        {"page_bytes": 1},
        {"handles": []},
        {"handles": {}},
        {"handles": [7]},
        {"handles": ["fd:7"]},
        {"handles": ["fd:123456789:1"]},
        {"handles": ["socket:7:1"]},
        {"handles": ["ipc:0011"]},
        {"handles": [SEGMENT]},
        {"handles": ["fd:7:1", "fabric:" + "00" * HANDLE_BYTES]},
        {"handles": [SEGMENT + ":1"], "page_bytes": 0},
        {"handles": [SEGMENT, SEGMENT], "page_bytes": 0},
    ],
)
def test_invalid_field_of_shared_memory_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="in shared memory"):
        SharedMemory.from_text(form(**changed))


@pytest.mark.parametrize("text", ["", "{", "3", "[]", "null", "{}", "[" * 100_000])
def test_invalid_text_of_shared_memory_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        SharedMemory.from_text(text)
