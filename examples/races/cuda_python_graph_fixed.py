"""Two nodes of a graph write the same memory, and an edge orders them."""

from cuda.bindings import driver

from cuda_driver import call, open_device, stream

SIZE = 1 << 24


def fill_node(graph, after, memory, value, context):
    fill = driver.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = memory, value, 1, SIZE, 1
    return call(driver.cuGraphAddMemsetNode(graph, after, len(after), fill, context))


context = open_device()
memory = call(driver.cuMemAlloc(SIZE))
graph = call(driver.cuGraphCreate(0))

first = fill_node(graph, [], memory, 0, context)
second = fill_node(graph, [first], memory, 1, context)

executable = call(driver.cuGraphInstantiate(graph, 0))
call(driver.cuGraphLaunch(executable, stream()))
call(driver.cuCtxSynchronize())
print("filled twice")
