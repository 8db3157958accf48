"""A backward pass runs on a side stream, and the current stream waits for it before the optimizer step."""

import torch

side = torch.cuda.Stream()
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(512, 1024, device="cuda")

side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    loss = model(batch).square().mean()
    loss.backward()

torch.cuda.current_stream().wait_stream(side)
optimizer.step()

torch.cuda.synchronize()
print(f"loss: {loss.item():.4f}")
