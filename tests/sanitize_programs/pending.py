"""The host polls an upload; ``race`` continues although the upload is not done.

A memory word holds up the upload, so that the first query certainly returns "not ready", which orders
nothing.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from cuda.bindings import driver

SIZE = 1 << 20


def call(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    assert status == driver.CUresult.CUDA_SUCCESS, status.name
    return values[0] if values else None


race = sys.argv[1] == "race"
call(driver.cuInit(0))
call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))))
upload, download = (call(driver.cuStreamCreate(0)) for _ in range(2))
done = call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
host = call(driver.cuMemAllocHost(2 * SIZE))
memory = call(driver.cuMemAlloc(SIZE))
word = call(driver.cuMemHostAlloc(4, driver.CU_MEMHOSTALLOC_DEVICEMAP))
released = ctypes.c_uint32.from_address(word)
released.value = 0 if race else 1
equal = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ

call(driver.cuStreamWaitValue32(upload, call(driver.cuMemHostGetDevicePointer(word, 0)), 1, equal))
call(driver.cuMemcpyHtoDAsync(memory, host, SIZE, upload))
call(driver.cuEventRecord(done, upload))
while (status := driver.cuEventQuery(done)[0]) != driver.CUresult.CUDA_SUCCESS:
    assert status == driver.CUresult.CUDA_ERROR_NOT_READY, status.name
    if race:
        break
call(driver.cuMemcpyDtoHAsync(host + SIZE, memory, SIZE, download))
released.value = 1
call(driver.cuCtxSynchronize())
print("uploaded and downloaded")
