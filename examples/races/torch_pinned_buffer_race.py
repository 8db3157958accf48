"""A pinned buffer is filled by one copy while another copy may still be reading it.

One staging buffer serves both directions. The download begins as soon as its own stream is free, and the
upload may then send what has just been downloaded.
"""

import torch

upload, download = torch.cuda.Stream(), torch.cuda.Stream()
staging = torch.ones(1 << 22, pin_memory=True)
result = torch.zeros(1 << 22, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(upload):
    batch = staging.to("cuda", non_blocking=True)
with torch.cuda.stream(download):
    # WRONG: the buffer may still be on its way up.
    staging.copy_(result, non_blocking=True)

torch.cuda.synchronize()
print(f"uploaded: {batch.sum().item():.0f}")
