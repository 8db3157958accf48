"""race: Two kernels of a graph modify the same array, and no edge orders them.

fixed: Two kernels of a graph modify the same array, and an edge orders them.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, open_device, packed, stream, zeros

race = sys.argv[1] == "race"

SOURCE = r"""
extern "C" __global__ void add(int *numbers) { numbers[threadIdx.x] += 1; }
extern "C" __global__ void multiply(int *numbers) { numbers[threadIdx.x] *= 2; }
"""


def add_node(graph, after, kernel, *arguments):
    node = driver.CUDA_KERNEL_NODE_PARAMS()
    _words, places = packed(arguments)
    node.func, node.kernelParams = kernel, places.ctypes.data
    node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
    node.blockDimX = 256
    return call(driver.cuGraphAddKernelNode(graph, after, len(after), node))


open_device()
module, graph = compiled(SOURCE), call(driver.cuGraphCreate(0))
numbers = zeros(4 * 256)
first = add_node(graph, [], function(module, "add"), numbers)
if race:
    add_node(graph, [], function(module, "multiply"), numbers)  # WRONG: no edge
else:
    add_node(graph, [first], function(module, "multiply"), numbers)
executable = call(driver.cuGraphInstantiate(graph, 0))
call(driver.cuGraphLaunch(executable, stream()))
call(driver.cuCtxSynchronize())
