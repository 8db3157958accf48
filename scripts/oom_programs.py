"""Run a program that runs out of GPU memory, with a known cause.

    python scripts/oom_programs.py NAME

scripts/check_oom.py runs all programs and compares the causes that memviz reports with the known causes. The
sizes depend on the memory of the GPU, so that each program fails on any GPU within a few hundred steps.
"""

from __future__ import annotations

import fcntl
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 2048
EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "memory"
_MIB = 1 << 20


def _wait_for_device() -> None:
    """Wait for the lock of the GPU if check_oom.py has started several programs."""
    if path := os.environ.get("OOM_PROGRAMS_LOCK"):
        fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)


_wait_for_device()
DEVICE_BYTES = torch.cuda.get_device_properties(0).total_memory
_PROGRAMS: dict[str, Callable[[], object]] = {}


def out_of_memory(program: Callable[[], object]) -> Callable[[], object]:
    """Register a program that runs out of memory."""
    _PROGRAMS[program.__name__] = program
    return program


def rows(share: float, tensors: int = 1) -> int:
    """Return the number of rows with which ``tensors`` float32 matrices of WIDTH columns fill a share."""
    return max(1, int(share * DEVICE_BYTES) // (tensors * WIDTH * 4))


def network(layers: int = 4) -> nn.Sequential:
    """Return a network with two activations of WIDTH columns for each layer."""
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair]).cuda()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    """Train for one step and return the loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    return loss.item()


# Programs that keep references to memory that they no longer need


@out_of_memory
def kept_outputs() -> None:
    """Keep the output of every batch on the GPU."""
    model, outputs = network(), []
    with torch.no_grad():
        for _ in range(200):
            batch = torch.randn(rows(0.01), WIDTH, device="cuda")
            outputs.append(model(batch))


@out_of_memory
def hidden_state_with_graph() -> None:
    """Carry a hidden state from step to step without detaching it."""
    cell = nn.GRUCell(WIDTH, WIDTH).cuda()
    hidden = torch.zeros(rows(0.002), WIDTH, device="cuda")
    for _ in range(500):
        hidden = cell(torch.randn_like(hidden), hidden)


@out_of_memory
def kept_exceptions() -> None:
    """Keep exceptions whose tracebacks hold the tensors of their frames."""
    model, failures = network(), []
    with torch.no_grad():
        for index in range(200):
            try:
                _check(model(torch.randn(rows(0.01), WIDTH, device="cuda")), index)
            except ValueError as error:
                failures.append(error)


def _check(output: Tensor, index: int) -> None:
    scaled = output * 1e30 * 1e30
    if not torch.isfinite(scaled).all():
        raise ValueError(f"batch {index} is not finite")


@out_of_memory
def hooks_keep_activations() -> None:
    """Keep the activations of every step in a hook."""
    model, activations = network(), []
    model[3].register_forward_hook(lambda *arguments: activations.append(arguments[-1].detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(200):
        train_step(model, optimizer, torch.randn(rows(0.01), WIDTH, device="cuda"))


@out_of_memory
def graph_for_every_shape() -> None:
    """Capture a CUDA graph with a separate memory pool for every batch size."""
    model, graphs = network(), []
    with torch.no_grad():
        for index in range(200):
            batch = torch.randn(rows(0.004) + 8 * index, WIDTH, device="cuda")
            model(batch)  # Create the workspace of cuBLAS before the capture.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = model(batch)
            graphs.append((graph, output))


@out_of_memory
def gradients_of_every_step() -> None:
    """Keep a copy of the gradients of every step."""
    model = nn.Sequential(*[nn.Linear(WIDTH, rows(0.003), bias=False), nn.Flatten()]).cuda()
    history = []
    for _ in range(400):
        model.zero_grad()
        model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        history.append([parameter.grad.clone() for parameter in model.parameters()])


# Programs whose steps need more and more memory


@out_of_memory
def longer_sequences() -> None:
    """Train on sequences that get longer from step to step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(60):
        length = rows(0.02 * (step + 1), tensors=8)
        train_step(model, optimizer, torch.randn(length, WIDTH, device="cuda"))


@out_of_memory
def search_for_batch_size() -> None:
    """Multiply the size of the batch until it no longer fits."""
    model, share = network(), 0.02
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        for _ in range(2):
            train_step(model, optimizer, torch.randn(rows(share, 8), WIDTH, device="cuda"))
        share *= 1.25


# Programs with a phase that needs much more memory than the other phases


@out_of_memory
def evaluation_batch() -> None:
    """Train with small batches, then evaluate all data at once."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(30):
        train_step(model, optimizer, torch.randn(rows(0.1, 8), WIDTH, device="cuda"))
    validation = torch.randn(rows(0.2), WIDTH, device="cuda")
    nn.functional.mse_loss(model(validation), validation)


@out_of_memory
def attention_of_long_prompt() -> None:
    """Compute the attention scores of a prompt that is much longer than all other prompts."""
    with torch.no_grad():
        for index in range(40):
            elements = int((0.6 if index == 30 else 0.02) * DEVICE_BYTES) // 4
            queries = torch.randn(int(elements**0.5), 64, device="cuda")
            torch.softmax(queries @ queries.T, dim=-1) @ queries


@out_of_memory
def copy_for_checkpoint() -> None:
    """Copy the state of a large model on the GPU in order to save it."""
    model = nn.Sequential(*[nn.Linear(WIDTH, rows(0.02), bias=False) for _ in range(8)]).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for step in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        if step == 15:
            state = [*model.state_dict().values()]
            for moments in optimizer.state.values():
                state += [moments["exp_avg"], moments["exp_avg_sq"]]
            copy = [tensor.clone() for tensor in state] + [tensor.double() for tensor in state]
            del copy


@out_of_memory
def first_optimizer_step() -> None:
    """Create the state of Adam for a model that fits only without that state."""
    model = nn.Sequential(*[nn.Linear(WIDTH, rows(0.035), bias=False) for _ in range(9)]).cuda()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@out_of_memory
def all_distances() -> None:
    """Compute a matrix of distances that is larger than the device."""
    points = torch.randn(int((1.5 * DEVICE_BYTES / 4) ** 0.5), 3, device="cuda")
    for chunk in points[:1_000_000:1000].split(100):
        torch.cdist(chunk, points)
    torch.cdist(points, points)


# Programs with a memory limit, or with memory in use outside PyTorch's allocator


@out_of_memory
def fraction_of_process() -> None:
    """Train with a batch that needs more memory than the limit of the process."""
    torch.cuda.set_per_process_memory_fraction(0.2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for share in (*[0.1] * 20, 0.4):
        train_step(model, optimizer, torch.randn(rows(share, 8), WIDTH, device="cuda"))


@out_of_memory
def another_process() -> None:
    """Train while another process holds most of the device."""
    code = f"import torch; x = torch.empty({int(0.75 * DEVICE_BYTES)}, dtype=torch.uint8, device='cuda')"
    command = [sys.executable, "-c", f"{code}; print('ready', flush=True); input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_plain_environment()
    ) as process:
        if process.stdout is not None:
            process.stdout.readline()
        try:
            _train_steadily(share=0.4)
        finally:
            process.communicate(b"\n")


def _plain_environment() -> dict[str, str]:
    """Return an environment in which cudakit does not record the process."""
    return {
        key: value
        for key, value in os.environ.items()
        if "CUDAKIT" not in key and key != "PYTHONPATH"
    }


@out_of_memory
def cupy_beside_torch() -> None:
    """Train while CuPy holds most of the device in the same process."""
    import cupy

    data: Any = cupy.empty(int(0.75 * DEVICE_BYTES), dtype=cupy.uint8)
    _train_steadily(share=0.4)
    del data


def _train_steadily(share: float) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        train_step(model, optimizer, torch.randn(rows(share, 8), WIDTH, device="cuda"))


# Programs with free memory that cannot serve the request


@out_of_memory
def small_results_between_activations() -> None:
    """Keep small results that were allocated between activations, and free the activations."""
    weights = torch.zeros(int(0.5 * DEVICE_BYTES), dtype=torch.uint8, device="cuda")
    results = _results_between_activations(0.45)
    torch.zeros(int(0.2 * DEVICE_BYTES), dtype=torch.uint8, device="cuda")
    del weights, results


def _results_between_activations(share: float) -> list[Tensor]:
    """Fill a share of the device with activations and results, and return the results."""
    activations, results = [], []
    for _ in range(int(share * DEVICE_BYTES) // (20 * _MIB)):
        activations.append(torch.empty(9 * _MIB, dtype=torch.uint8, device="cuda"))
        results.append(torch.empty(2 * _MIB, dtype=torch.uint8, device="cuda"))
        activations.append(torch.empty(9 * _MIB, dtype=torch.uint8, device="cuda"))
    return results


@out_of_memory
def blocks_of_another_stream() -> None:
    """Leave free memory in segments of a side stream, which the main stream cannot use."""
    with torch.cuda.stream(torch.cuda.Stream()):
        results = _results_between_activations(0.7)
    _train_steadily(share=0.4)
    del results


@out_of_memory
def replay_buffer_of_varying_sizes() -> None:
    """Replace random episodes of a replay buffer by episodes of other lengths."""
    rng = random.Random(1)
    buffer: list[Tensor] = []
    for _ in range(300):
        size = rng.randint(8, 128) * (DEVICE_BYTES // 2000)
        while sum(episode.numel() for episode in buffer) + size > 0.82 * DEVICE_BYTES:
            buffer.pop(rng.randrange(len(buffer)))
        buffer.append(torch.zeros(size, dtype=torch.uint8, device="cuda"))


def main() -> None:
    """Run the program named on the command line."""
    torch.backends.cuda.matmul.allow_tf32 = True
    name = sys.argv.pop(1)
    example = EXAMPLES / f"{name}.py"
    if example.exists():
        runpy.run_path(str(example), run_name="__main__")
    else:
        _PROGRAMS[name]()
    torch.cuda.synchronize()
    print(name, "ended without an error")


if __name__ == "__main__":
    main()
