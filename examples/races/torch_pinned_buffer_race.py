"""A pinned buffer receives a download while an upload may still be reading it.

Both directions share one staging buffer. The download waits only for earlier work of its
stream, so that the upload may send the downloaded data.
"""

import torch

upload, download = torch.cuda.Stream(), torch.cuda.Stream()
staging = torch.ones(1 << 22, pin_memory=True)
result = torch.zeros(1 << 22, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(upload):
    batch = staging.to("cuda", non_blocking=True)
with torch.cuda.stream(download):
    # WRONG: the upload may still be reading the buffer.
    staging.copy_(result, non_blocking=True)

torch.cuda.synchronize()
print(f"uploaded: {batch.sum().item():.0f}")
