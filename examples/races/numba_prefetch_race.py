"""An array is copied to the GPU on one stream, and a kernel on another stream reads it without waiting.

Both are blocking streams: ordered with the default stream, but not with each other.
"""

from numba import cuda

upload, work = cuda.stream(), cuda.stream()


@cuda.jit
def double(numbers):
    i = cuda.grid(1)
    if i < numbers.size:
        numbers[i] *= 2


host = cuda.pinned_array(1 << 20, dtype="f4")
host[:] = 1
numbers = cuda.to_device(host, stream=upload)

# WRONG: the kernel's stream does not wait for the copy.
double[1 << 12, 256, work](numbers)

work.synchronize()
upload.synchronize()
print(f"last: {numbers.copy_to_host()[-1]:.0f}")
