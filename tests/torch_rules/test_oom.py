"""The message, details and remedies of an out-of-memory error."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from allocator.device import GIB, MIB, Device

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.gpu.api.facts import Process
from cudakit.torch_rules.oom import (
    OomReport,
    Pin,
    StreamPool,
    details,
    hint_of,
    message_of,
    remedies,
)
from cudakit.units import Unavailable

STREAM_CACHE = StreamPool((0, 0), False, 0, 40 * GIB, 3 * GIB, 1 * GIB, 0, 0)
REPORT = OomReport(
    device=0,
    requested_bytes=2 * GIB - 100,
    block_bytes=2 * GIB,
    segment_bytes=2 * GIB,
    stream=0,
    pool=(0, 0),
    is_small=False,
    device_free_bytes=1 * GIB,
    device_total_bytes=80 * GIB,
    limit_bytes=None,
    allocated_bytes=37 * GIB,
    reserved_bytes=40 * GIB,
    private_free_bytes=0,
    pending_bytes=0,
    max_split_size_bytes=None,
    expandable_segments=False,
    stream_pools=(STREAM_CACHE,),
    pins=(),
)


def process(pid: int, used: int | Unavailable, kind: str = "compute") -> Process:
    return Process(pid, kind, used, "python train.py", "somebody")


def test_oom_message_has_pytorchs_sentences_in_order() -> None:
    report = replace(
        REPORT,
        limit_bytes=41 * GIB,
        private_free_bytes=1 * GIB,
        processes=(process(7, 38 * GIB), process(os.getpid(), 41 * GIB)),
    )

    assert message_of(report) == (
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1024.00 MiB is free."
        " Process 7 has 38.00 GiB memory in use."
        " Including memory outside of this allocator, this process has 41.00 GiB memory in use."
        " 41.00 GiB allowed;"
        " Of the allocated memory 38.00 GiB is allocated by this allocator,"
        " with 1024.00 MiB allocated in private pools (e.g., CUDA Graphs),"
        " and 2.00 GiB is reserved by this allocator but unallocated."
    )


@pytest.mark.parametrize(
    "processes",
    [
        Unavailable("NVML is not there"),
        (),
        (process(os.getpid(), Unavailable("not counted")),),
    ],
)
def test_without_nvml_figures_memory_in_use_comes_from_the_driver(
    processes: tuple[Process, ...] | Unavailable,
) -> None:
    message = message_of(replace(REPORT, processes=processes))

    assert "39.00 GiB is in use outside of this allocator." in message
    assert "this process" not in message


def test_processes_are_deduplicated_and_few_are_named() -> None:
    twice = process(1, 9 * GIB), process(1, 9 * GIB, "graphics")
    others = tuple(process(pid, pid * MIB) for pid in range(2, 9))
    message = message_of(replace(REPORT, processes=twice + others))

    assert message.count("Process 1 has 9.00 GiB") == 1
    assert message.count("Process ") == 4
    assert "4 more processes use less each." in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"segment_bytes": 90 * GIB}, "request less: the device has less memory"),
        (
            {},
            "3.00 GiB is free, but the largest free block is 1.00 GiB: set expandable_segments:True",
        ),
        ({"expandable_segments": True}, "1.00 GiB: free the blocks between them"),
        (
            {"limit_bytes": 41 * GIB, "device_free_bytes": 30 * GIB},
            "raise the memory fraction to 0.53: the device has free memory, but the limit is 41.0 GiB",
        ),
        (
            {"bytes_by_awaited_stream": ((0xC, 2 * GIB), (0xD, 1 * GIB))},
            "2.00 GiB was freed but waits for stream 0xc",
        ),
        (
            {
                "stream_pools": (
                    STREAM_CACHE,
                    replace(STREAM_CACHE, stream=0xC, largest_free_bytes=2 * GIB),
                )
            },
            "a block of 2.00 GiB is cached in the large blocks on stream 0xc",
        ),
        (
            {"stream_pools": (replace(STREAM_CACHE, largest_free_bytes=2 * GIB),)},
            "came too late: create the allocator with search_again=True",
        ),
        (
            {
                "stream_pools": (replace(STREAM_CACHE, largest_free_bytes=3 * GIB),),
                "max_split_size_bytes": 2 * GIB,
            },
            "a free block of 3.00 GiB was not used: raise max_split_size_mb",
        ),
        (
            {"is_capturing": True, "pending_bytes": 5 * GIB},
            "during a capture 5.00 GiB of cached or pending memory",
        ),
        (
            {
                "is_rejected": True,
                "stream_pools": (replace(STREAM_CACHE, releasable_bytes=2 * GIB),),
            },
            "without throw_on_cudamalloc_oom:True 2.00 GiB",
        ),
        (
            {"private_free_bytes": 3 * GIB},
            "3.00 GiB is cached in private pools: close graphs",
        ),
        (
            {
                "block_bytes": 5 * MIB,
                "segment_bytes": 20 * MIB,
                "device_free_bytes": 13 * MIB,
                "stream_pools": (),
            },
            "but a segment of 20.0 MiB does not: set large_segment_size_mb:12",
        ),
        ({"processes": (process(7, 38 * GIB),)}, "end process 7, which uses 38.0 GiB"),
        ({"stream_pools": ()}, "39.0 GiB is in use outside of this allocator: `cudakit devices`"),
    ],
)
def test_each_verdict_has_its_remedy(changes: dict[str, object], words: str) -> None:
    assert words in hint_of(replace(REPORT, **changes))  # type: ignore[arg-type]


def test_without_a_remedy_recording_history_is_suggested() -> None:
    full = replace(REPORT, stream_pools=(), reserved_bytes=79 * GIB)
    pin = Pin(0x7F00, MIB, MIB, 2 * MIB, MIB, [{"name": "f", "filename": "a.py", "line": 1}])

    assert remedies(full) == (
        "free memory, or request less: record_history() and save_on_out_of_memory() and then"
        " `cudakit memviz` show what uses it",
    )
    assert "record_history" not in hint_of(replace(full, pins=(pin,)))


def test_details_fit_80_columns_and_end_with_what_would_have_helped() -> None:
    stream_pools = tuple(
        replace(STREAM_CACHE, stream=0x55555 * n, pool=(0, n % 3)) for n in range(9)
    )
    pins = tuple(Pin(0x7F0123456789, 20 * MIB, 1, 1023 * MIB, 1003 * MIB, []) for _ in range(3))
    text = details(replace(REPORT, stream_pools=stream_pools, pins=pins, limit_bytes=41 * GIB))

    assert max(map(len, text.splitlines())) <= 80
    assert "3 more" in text
    assert "Possible remedies:\n  - 3.00 GiB is free" in text
    assert "  20.0 MiB at 0x7f0123456789 keeps a segment of 1023 MiB, 98.0% free" in text


def test_error_text_is_pytorchs_line_then_details_then_remedies() -> None:
    allocator = DeviceCachingAllocator(Device(20 * MIB))
    allocator.record_history(context="state")
    held = [allocator.alloc(4 * MIB) for _ in range(5)]
    allocator.free(held[0])

    with pytest.raises(OutOfMemory) as caught:
        allocator.alloc(8 * MIB)

    message, asked, header, each, pins, pin, place, helped, *_ = str(caught.value).splitlines()
    assert message == caught.value.message
    assert message.startswith("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total")
    assert asked == "Requested: 8.00 MiB in the large blocks on stream 0x0"
    assert header.split() == ["Reserved", "Free", "Largest", "free", "Pending", "Serves"]
    assert each.split()[:8] == ["20.0", "MiB", "4.00", "MiB", "4.00", "MiB", "0", "B"]
    assert pins == "Blocks in use in mostly free segments, which they keep reserved:"
    assert pin == f"  4.00 MiB at {held[1]:#x} keeps a segment of 20.0 MiB, 20.0% free"
    assert place.startswith(f"    {__file__}:")
    assert helped == "Possible remedies:"
    assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
