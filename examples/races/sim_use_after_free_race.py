"""Memory is freed on one stream while a fill on another one may still run (simulated device)."""

from cudakit.gpu.open import open_gpu

SIZE = 1 << 20

gpu = open_gpu("sim")
owner, user = gpu.stream(), gpu.stream()
allocated, filled = gpu.event(timing=False), gpu.event(timing=False)

memory = gpu.malloc(SIZE, owner)
gpu.record(allocated, owner)
gpu.wait(user, allocated)
gpu.fill(memory, 0, SIZE, user)

# WRONG: the event is recorded after the fill, but the owner does not wait for it.
gpu.record(filled, user)
gpu.free(memory, owner)

gpu.sync()
gpu.close()
