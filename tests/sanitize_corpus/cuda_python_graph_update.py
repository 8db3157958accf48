"""race: The kernel of an executable graph gets another array, which a second stream writes.

fixed: The kernel of an executable graph gets another array, so a second stream may write the first one.
"""

import sys

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, packed, stream, zeros

race = sys.argv[1] == "race"

SOURCE = 'extern "C" __global__ void add(int *numbers) { numbers[threadIdx.x] += 1; }'

open_device()
first, second = stream(), stream()
add, graph = function(compiled(SOURCE), "add"), call(driver.cuGraphCreate(0))
numbers, others = zeros(4 * 256), zeros(4 * 256)

node = driver.CUDA_KERNEL_NODE_PARAMS()
node.func, node.blockDimX = add, 256
node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
words, places = packed([numbers])
node.kernelParams = places.ctypes.data
added = call(driver.cuGraphAddKernelNode(graph, [], 0, node))
executable = call(driver.cuGraphInstantiate(graph, 0))
call(driver.cuGraphLaunch(executable, first))
call(driver.cuCtxSynchronize())

words[0] = others
call(driver.cuGraphExecKernelNodeSetParams(executable, added, node))
call(driver.cuGraphLaunch(executable, first))
# WRONG if race: the updated graph modifies this array.
launch(add, second, 1, 256, others if race else numbers)
call(driver.cuCtxSynchronize())
