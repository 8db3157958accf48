"""A pinned buffer receives a download after the upload has read it."""

import torch

upload, download = torch.cuda.Stream(), torch.cuda.Stream()
staging = torch.ones(1 << 22, pin_memory=True)
result = torch.zeros(1 << 22, device="cuda")
torch.cuda.synchronize()

with torch.cuda.stream(upload):
    batch = staging.to("cuda", non_blocking=True)
download.wait_stream(upload)
with torch.cuda.stream(download):
    staging.copy_(result, non_blocking=True)

torch.cuda.synchronize()
print(f"uploaded: {batch.sum().item():.0f}")
