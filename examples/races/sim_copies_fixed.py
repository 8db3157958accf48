"""One stream copies to a device buffer; another waits for it and fills the buffer (simulated device)."""

from cudakit.gpu.open import open_gpu

SIZE = 1 << 20

gpu = open_gpu("sim")
upload, clearing = gpu.stream(), gpu.stream()
host, memory = gpu.host_malloc(SIZE), gpu.malloc(SIZE)

gpu.copy(memory, host, SIZE, upload)
copied = gpu.event(timing=False)
gpu.record(copied, upload)
gpu.wait(clearing, copied)
gpu.fill(memory, 0, SIZE, clearing)

gpu.sync()
gpu.close()
