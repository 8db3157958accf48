"""Programs that run out of memory for a known cause, on cudakit's allocator instead of a GPU.

The programs have the allocations and call stacks of those in scripts/oom_programs.py. ``nn``, ``layers`` and
``optim`` stand for PyTorch's modules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from allocator.device import MIB
from allocator.virtual_device import VirtualDevice
from memory.whatif.recordings import read

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pools import MemPool
from cudakit.memory.snapshot import Snapshot
from cudakit.torch_rules.settings import Settings

DEVICE = 8192 * MIB


class Tensor:
    """Memory that is freed with its last reference. Its autograd graph keeps ``inputs``."""

    def __init__(self, gpu: Gpu, size: int, inputs: tuple[Any, ...] = ()) -> None:
        self.gpu, self.size, self.inputs = gpu, size, inputs
        self.ptr = gpu.allocator.alloc(size, gpu.stream)

    def __del__(self) -> None:
        if hasattr(self, "ptr"):
            self.gpu.allocator.free(self.ptr)


class Gpu:
    """A device of DEVICE bytes, of which other processes hold ``outside`` bytes."""

    def __init__(self, *, outside: int = 0, settings: Settings | None = None) -> None:
        self.device = VirtualDevice(DEVICE - outside)
        self.allocator = DeviceCachingAllocator(
            self.device, settings or Settings(), search_again=False
        )
        self.allocator.record_history()
        self.stream = 0

    def empty(self, share: float) -> Tensor:
        return Tensor(self, int(share * DEVICE))

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        self.stream, before = stream, self.stream
        yield
        self.stream = before

    def snapshot(self, *, with_total: bool = True) -> Snapshot:
        snapshot = read(self.allocator.snapshot())
        if not with_total:
            return snapshot
        # The settings of a snapshot of PyTorch have no key of cudakit's allocator.
        settings = {
            name: value
            for name, value in snapshot.settings.items()
            if not name.startswith("cudakit_")
        }
        return replace(snapshot, settings=settings | {"device_total_bytes": [DEVICE]})


def _module(path: str, source: str) -> SimpleNamespace:
    names: dict[str, Any] = {"Tensor": Tensor}
    exec(compile(source, f"/usr/lib/python3/site-packages/torch/{path}", "exec"), names)  # noqa: S102
    return SimpleNamespace(**names)


# The call stacks of PyTorch's layers and optimizers.
nn = _module(
    "nn/modules/module.py",
    """
def _call_impl(forward, *inputs):
    return forward(*inputs)

def _apply(gpu, size):
    return Tensor(gpu, size)
""",
)
layers = _module(
    "nn/modules/linear.py",
    """
def linear(x, keep):
    return Tensor(x.gpu, x.size, (x,) if keep else ())

def gelu(x, keep):
    return Tensor(x.gpu, x.size, (x,) if keep else ())
""",
)
optim = _module(
    "optim/adam.py",
    """
def step(parameters, state):
    for parameter in parameters:
        if id(parameter) not in state:
            state[id(parameter)] = _init_group(parameter)
        denominator = Tensor(parameter.gpu, parameter.size)
        del denominator

def _init_group(parameter):
    first = Tensor(parameter.gpu, parameter.size)
    second = Tensor(parameter.gpu, parameter.size)
    return first, second
""",
)


def forward(x: Tensor, *, keep: bool, n_layers: int = 4) -> Tensor:
    """Run a network of linear layers and activations; ``keep`` records the graph."""

    def run(x: Tensor) -> Tensor:
        for _ in range(n_layers):
            x = nn._call_impl(layers.linear, x, keep)
            x = nn._call_impl(layers.gelu, x, keep)
        return x

    return nn._call_impl(run, x)  # type: ignore[no-any-return]


def train_step(batch: Tensor, parameters: list[Tensor]) -> None:
    loss = Tensor(batch.gpu, 512, (forward(batch, keep=True),))
    gradients = [Tensor(batch.gpu, parameter.size) for parameter in parameters]
    del gradients
    temporary = Tensor(batch.gpu, batch.size)
    del temporary, loss


def network(gpu: Gpu, share: float = 0.002) -> list[Tensor]:
    return [nn._apply(gpu, int(share * DEVICE)) for _ in range(4)]


# --- programs that retain memory


def kept_outputs(gpu: Gpu) -> None:
    outputs = []
    for _ in range(200):
        outputs.append(forward(gpu.empty(0.01), keep=False))  # noqa: PERF401


def hidden_state_with_graph(gpu: Gpu) -> None:
    hidden = gpu.empty(0.002)
    for _ in range(900):
        hidden = Tensor(gpu, hidden.size, (hidden, gpu.empty(0.002)))


def kept_exceptions(gpu: Gpu) -> None:
    failures = []
    for index in range(200):
        try:
            _check(forward(gpu.empty(0.01), keep=False), index)
        except ValueError as error:
            failures.append(error)


def _check(output: Tensor, index: int) -> None:
    scaled = Tensor(output.gpu, output.size)
    if scaled.size:
        raise ValueError(index)


def sum_of_losses(gpu: Gpu) -> None:
    parameters = network(gpu)
    total: Tensor | None = None
    for _ in range(200):
        batch = gpu.empty(0.005)
        loss = forward(batch, keep=True)
        total = Tensor(gpu, 512, (total, loss))
    del parameters


def gradients_of_every_step(gpu: Gpu) -> None:
    parameters = network(gpu, 0.001)
    history = []
    for _ in range(400):
        train_step(gpu.empty(0.0005), parameters)
        history.append([Tensor(gpu, parameter.size) for parameter in parameters])


def hooks_keep_activations(gpu: Gpu) -> None:
    parameters, activations = network(gpu), []
    for _ in range(200):
        batch = gpu.empty(0.01)
        train_step(batch, parameters)
        activations.append(Tensor(gpu, batch.size))


def graph_for_every_shape(gpu: Gpu) -> None:
    graphs = []
    for index in range(200):
        batch = gpu.empty(0.004 + index * 1e-5)
        pool = MemPool(gpu.allocator)
        with gpu.allocator.use_pool(pool):
            output = forward(batch, keep=False)
        graphs.append((pool, output))


def tensors_in_a_list(gpu: Gpu) -> None:
    kept = []
    for _ in range(100):
        kept.append(gpu.empty(0.02))  # noqa: PERF401


# --- programs whose steps need more and more memory


def key_value_cache(gpu: Gpu) -> None:
    caches: list[Tensor | None] = [None] * 4
    for step in range(200):
        with gpu.allocator.annotated(f"step {step}"):
            for layer in range(4):
                new = gpu.empty(0.0015)
                caches[layer] = _append(gpu, caches[layer], new)


def _append(gpu: Gpu, cache: Tensor | None, new: Tensor) -> Tensor:
    return Tensor(gpu, (cache.size if cache else 0) + new.size)


def longer_sequences(gpu: Gpu) -> None:
    parameters = network(gpu)
    for step in range(60):
        train_step(gpu.empty(0.0025 * (step + 1)), parameters)


def search_for_batch_size(gpu: Gpu) -> None:
    parameters, share = network(gpu), 0.0025
    for _ in range(40):
        for _ in range(2):
            train_step(gpu.empty(share), parameters)
        share *= 1.25


# --- programs with one phase that needs much more memory


def evaluation_batch(gpu: Gpu) -> None:
    parameters = network(gpu)
    for _ in range(30):
        train_step(gpu.empty(0.012), parameters)
    validation = gpu.empty(0.2)
    forward(validation, keep=True)


def attention_of_long_prompt(gpu: Gpu) -> None:
    for index in range(40):
        elements = 0.6 if index == 30 else 0.02
        queries = gpu.empty(0.0001)
        scores = gpu.empty(elements)
        weights = gpu.empty(elements)
        del scores, weights, queries


def copy_for_checkpoint(gpu: Gpu) -> None:
    parameters = [nn._apply(gpu, int(0.02 * DEVICE)) for _ in range(8)]
    state: dict[int, Any] = {}
    for step in range(20):
        gradients = [gpu.empty(0.02) for _ in parameters]
        optim.step(parameters, state)
        del gradients
        if step == 15:
            copy = [gpu.empty(0.02) for _ in range(24)] + [gpu.empty(0.04) for _ in range(24)]
            del copy


def first_optimizer_step(gpu: Gpu) -> None:
    parameters = [nn._apply(gpu, int(0.035 * DEVICE)) for _ in range(9)]
    gradients = []
    for _ in parameters:
        gradients.append(gpu.empty(0.035))  # noqa: PERF401
    optim.step(parameters, {})


def request_of_all_distances(gpu: Gpu) -> None:
    points = gpu.empty(0.0001)
    for _ in range(10):
        gpu.empty(0.001)
    gpu.empty(1.5)
    del points


# --- programs with a memory limit, or with memory of other processes


def train_steadily(gpu: Gpu, share: float = 0.4, steps: int = 20) -> None:
    parameters = network(gpu)
    for _ in range(steps):
        train_step(gpu.empty(share / 8), parameters)


def larger_step_than_the_limit(gpu: Gpu) -> None:
    parameters = network(gpu)
    for share in (*[0.1] * 20, 0.4):
        train_step(gpu.empty(share / 8), parameters)


# --- programs with free memory that cannot serve the request


def small_results_between_activations(gpu: Gpu) -> None:
    weights = gpu.empty(0.5)
    results = results_between_activations(gpu, 0.45)
    gpu.empty(0.2)
    del weights, results


def results_between_activations(gpu: Gpu, share: float) -> list[Tensor]:
    activations, results = [], []
    for _ in range(int(share * DEVICE) // (20 * MIB)):
        activations.append(Tensor(gpu, 9 * MIB))
        results.append(Tensor(gpu, 2 * MIB))
        activations.append(Tensor(gpu, 9 * MIB))
    return results


def blocks_of_another_stream(gpu: Gpu) -> None:
    with gpu.on_stream(7):
        results = results_between_activations(gpu, 0.7)
    train_steadily(gpu)
    del results


def replay_buffer_of_varying_sizes(gpu: Gpu) -> None:
    rng = random.Random(1)
    buffer: list[Tensor] = []
    for _ in range(300):
        size = rng.randint(8, 128) * (DEVICE // 2000)
        while sum(episode.size for episode in buffer) + size > 0.85 * DEVICE:
            buffer.pop(rng.randrange(len(buffer)))
        buffer.append(Tensor(gpu, size))


def requests_of_varying_lengths(gpu: Gpu) -> None:
    rng = random.Random(0)
    weights = [gpu.empty(0.02) for _ in range(4)]
    sessions: list[list[Tensor]] = []
    for _ in range(300):
        length = rng.randint(4, 64)
        needed = 4 * length * DEVICE // 4000
        while used(weights, *sessions) + needed > 0.8 * DEVICE:
            sessions.pop(rng.randrange(len(sessions)))
        sessions.append(prefill(gpu, length))


def prefill(gpu: Gpu, length: int) -> list[Tensor]:
    activations = Tensor(gpu, 4 * length * DEVICE // 4000)
    cache = []
    for _ in range(2):
        keys = Tensor(gpu, length * DEVICE // 4000)
        values = Tensor(gpu, length * DEVICE // 4000)
        cache += [keys, values]
    del activations
    return cache


def used(*caches: list[Tensor]) -> int:
    return sum(tensor.size for cache in caches for tensor in cache)


# --- programs that need more memory than the device has


def deep_network(gpu: Gpu) -> None:
    network(gpu)
    forward(gpu.empty(0.02), keep=True, n_layers=40)


def run(program: Callable[[Gpu], None], gpu: Gpu) -> bool:
    """Run a program until it ends or is out of memory; return whether it ended."""
    with suppress(OutOfMemory):
        program(gpu)
        return True
    return False
