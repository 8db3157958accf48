"""The host waits for that of two contexts whose streams share memory."""

from cuda.bindings import driver

from cuda_kernels import call, compiled, function, launch, open_device, stream, zeros

SOURCE = 'extern "C" __global__ void add(int *numbers) { numbers[threadIdx.x] += 1; }'

primary = open_device()
own = call(driver.cuCtxCreate(None, 0, call(driver.cuDeviceGet(0))))  # current from here on
first, second = stream(), stream()
add, numbers = function(compiled(SOURCE), "add"), zeros(4 * 256)

launch(add, first, 1, 256, numbers)
call(driver.cuCtxSynchronize())
launch(add, second, 1, 256, numbers)
call(driver.cuCtxSynchronize())
