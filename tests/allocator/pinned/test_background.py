from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from time import monotonic, sleep

from allocator.device import MIB
from allocator.pinned.host import Host

from cudakit.allocator.pinned import BackgroundThread, CachingHostAllocator
from cudakit.torch_rules.settings import Settings

IN_BACKGROUND = Settings(pinned_use_background_threads=True)


def soon(condition: Callable[[], bool]) -> bool:
    end = monotonic() + 10
    while not condition() and monotonic() < end:
        sleep(0.002)
    return condition()


class Work:
    def __init__(self, times: int) -> None:
        self.remaining = times

    def once(self) -> bool:
        self.remaining -= 1
        return self.remaining > 0


def test_background_worker_sleeps_without_work_and_continues_when_woken() -> None:
    work = Work(3)
    background = BackgroundThread(work.once)
    background.wake()
    assert soon(lambda: work.remaining == 0)
    work.remaining = 2
    background.wake()
    assert soon(lambda: work.remaining == 0)
    background.stop()


def test_background_thread_frees_blocks_without_a_request(host: Host) -> None:
    pool = CachingHostAllocator(host, IN_BACKGROUND)
    ptr = pool.alloc(MIB)
    pool.record_use(ptr, 11)
    pool.free(ptr)
    host.finish(11)

    assert soon(lambda: pool.counters()["free_bytes"] == MIB)
    assert pool.alloc(MIB) == ptr
    pool.close()


def test_request_processes_events_before_calling_the_driver(host: Host) -> None:
    pool = CachingHostAllocator(host, IN_BACKGROUND)
    ptr = pool.alloc(MIB)
    pool.record_use(ptr, 11)
    host.device.recorded[11] = 1
    pool.free(ptr)
    host.finish(11)

    assert pool.alloc(MIB) == ptr
    pool.close()


def test_background_thread_ends_with_its_pool() -> None:
    earlier_threads = set(threading.enumerate())
    pool = CachingHostAllocator(Host(), IN_BACKGROUND)
    ptr = pool.alloc(MIB)
    pool.record_use(ptr, 11)
    pool.free(ptr)
    pool_reference = weakref.ref(pool)
    del pool
    gc.collect()

    assert soon(lambda: pool_reference() is None and set(threading.enumerate()) <= earlier_threads)
