"""Memory is freed on one stream, which waits for the fill on another one (simulated device)."""

from cudakit.gpu.open import open_gpu

SIZE = 1 << 20

gpu = open_gpu("sim")
owner, user = gpu.stream(), gpu.stream()
allocated, filled = gpu.event(timing=False), gpu.event(timing=False)

memory = gpu.malloc(SIZE, owner)
gpu.record(allocated, owner)
gpu.wait(user, allocated)
gpu.fill(memory, 0, SIZE, user)

gpu.record(filled, user)
gpu.wait(owner, filled)
gpu.free(memory, owner)

gpu.sync()
gpu.close()
