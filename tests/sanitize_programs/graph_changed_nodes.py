"""Change the copy and the memset of an executable graph; ``race`` fills the new source on another stream.

Otherwise the other stream fills the source and the destination that the graph no longer uses.
"""

import sys

from cuda.bindings import driver

BYTES = 1 << 20


def call(answer):
    """Return the results of a call. Raises RuntimeError if the call failed."""
    status, *values = answer
    if status.value:
        raise RuntimeError(status.name)
    return values[0] if len(values) == 1 else tuple(values)


def copy_parameters(source, destination):
    copy = driver.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = source, destination
    copy.WidthInBytes, copy.Height, copy.Depth = BYTES, 1, 1
    return copy


def memset_parameters(address):
    memset = driver.CUDA_MEMSET_NODE_PARAMS()
    memset.dst, memset.elementSize, memset.width, memset.height = address, 1, BYTES, 1
    return memset


call(driver.cuInit(0))
context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
call(driver.cuCtxSetCurrent(context))
first, second = (
    call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)) for _ in range(2)
)
source, destination, filled, new_source, new_destination, new_filled = (
    call(driver.cuMemAlloc(BYTES)) for _ in range(6)
)

graph = call(driver.cuGraphCreate(0))
copy = call(
    driver.cuGraphAddMemcpyNode(graph, [], 0, copy_parameters(source, destination), context)
)
memset = call(driver.cuGraphAddMemsetNode(graph, [], 0, memset_parameters(filled), context))
executable = call(driver.cuGraphInstantiate(graph, 0))
call(driver.cuGraphLaunch(executable, first))
call(driver.cuCtxSynchronize())

changed = copy_parameters(new_source, new_destination)
call(driver.cuGraphExecMemcpyNodeSetParams(executable, copy, changed, context))
changed = memset_parameters(new_filled)
call(driver.cuGraphExecMemsetNodeSetParams(executable, memset, changed, context))
call(driver.cuGraphLaunch(executable, first))
# WRONG if race: the changed graph may still read the new source and fill its new buffer.
for address in (new_source, new_filled) if sys.argv[1] == "race" else (source, filled):
    call(driver.cuMemsetD8Async(address, 1, BYTES, second))
call(driver.cuCtxSynchronize())
