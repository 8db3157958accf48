"""One stream copies to a device buffer; another fills it without waiting (simulated device)."""

from cudakit.gpu.open import open_gpu

SIZE = 1 << 20

gpu = open_gpu("sim")
upload, clearing = gpu.stream(), gpu.stream()
host, memory = gpu.host_malloc(SIZE), gpu.malloc(SIZE)

gpu.copy(memory, host, SIZE, upload)
# WRONG: the two streams are not ordered, and either may write last.
gpu.fill(memory, 0, SIZE, clearing)

gpu.sync()
gpu.close()
