"""A backward pass runs on a side stream, and the optimizer step on the current stream does not wait for it.

``backward()`` orders its kernels with the stream that it is called on, here the side stream. Another stream
that uses the gradients must wait for that stream. Both sides are kernels, so finding the race needs exact
accesses.
"""

import torch

side = torch.cuda.Stream()
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(512, 1024, device="cuda")

side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    loss = model(batch).square().mean()
    loss.backward()

# WRONG: the side stream may still be computing the gradients, and reading the weights.
optimizer.step()

torch.cuda.synchronize()
print(f"loss: {loss.item():.4f}")
