"""A kernel computes a result on one stream; another stream copies it to the host without waiting."""

from numba import cuda

work, download = cuda.stream(), cuda.stream()


@cuda.jit
def count(numbers):
    i = cuda.grid(1)
    if i < numbers.size:
        numbers[i] = i


host = cuda.pinned_array(1 << 20, dtype="i4")
numbers = cuda.device_array(1 << 20, dtype="i4")
count[1 << 12, 256, work](numbers)

# WRONG: the copy may begin before the kernel has written anything.
numbers.copy_to_host(host, stream=download)

download.synchronize()
print(f"last: {host[-1]}")
work.synchronize()
