"""A kernel computes a result on one stream; another stream waits for it and copies it to the host."""

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

counted = cuda.event(timing=False)
counted.record(work)
counted.wait(download)
numbers.copy_to_host(host, stream=download)

download.synchronize()
print(f"last: {host[-1]}")
work.synchronize()
