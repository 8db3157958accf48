"""Memory is freed in the order of one stream while another may still fill it; on a simulated device."""

from cudakit.gpu.open import open_gpu

SIZE = 1 << 20

gpu = open_gpu("sim")
owner, user = gpu.stream(), gpu.stream()
allocated, filled = gpu.event(timing=False), gpu.event(timing=False)

memory = gpu.malloc(SIZE, owner)
gpu.record(allocated, owner)
gpu.wait(user, allocated)
gpu.fill(memory, 0, SIZE, user)

# WRONG: the event of the fill is recorded, and nobody waits for it.
gpu.record(filled, user)
gpu.free(memory, owner)

gpu.sync()
gpu.close()
