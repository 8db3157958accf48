"""``cudakit.Generator`` on simulated devices and in numpy; on a real GPU in test_generator_on_gpu.py."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cudakit
from cudakit import Generator
from cudakit.errors import InputError, UsageError
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.device_array import DeviceArray
from cudakit.gpu.sim import Sim

FLOATS = ["float64", "float32", "float16", "bfloat16"]
METHODS = ["bits", "uniform", "normal", "integers"]


def draw(generator: Generator, method: str, shape: Any, **options: Any) -> Any:
    arguments = (0, 100, shape) if method == "integers" else (shape,)
    return getattr(generator, method)(*arguments, **options)


@pytest.fixture
def on_host() -> Generator:
    return Generator(5, device="numpy")


@pytest.fixture
def on_device() -> Generator:
    return Generator(5, device="sim")


# --- equal numbers


@pytest.mark.parametrize("method", [*METHODS, "permutation"])
def test_device_and_numpy_give_the_same_numbers(
    method: str, on_device: Generator, on_host: Generator
) -> None:
    for count in (1, 5, 1000):
        on_gpu = draw(on_device, method, count)
        assert isinstance(on_gpu, DeviceArray)
        assert np.array_equal(on_gpu.copy_to_host(), draw(on_host, method, count))
    assert on_device.state() == on_host.state()


@pytest.mark.parametrize("method", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_device_and_numpy_give_the_same_floats_of_every_dtype(
    method: str, dtype: str, on_device: Generator, on_host: Generator
) -> None:
    on_gpu = draw(on_device, method, (7, 3), dtype=dtype)

    assert (on_gpu.shape, on_gpu.dtype) == ((7, 3), dtype)
    assert np.array_equal(on_gpu.copy_to_host(), draw(on_host, method, (7, 3), dtype=dtype))


@given(
    st.sampled_from(METHODS),
    st.lists(st.integers(1, 20).map(lambda count: 8 * count), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_calls_of_whole_blocks_give_the_numbers_of_one_call(
    method: str, counts: list[int], last_count: int
) -> None:
    in_parts, at_once = Generator(1, device="numpy"), Generator(1, device="numpy")

    parts = [draw(in_parts, method, count) for count in (*counts, last_count)]

    assert np.array_equal(np.concatenate(parts), draw(at_once, method, sum(counts) + last_count))
    assert in_parts.position == at_once.position


def test_seeds_and_sequences_give_different_numbers() -> None:
    generators = [
        Generator(seed, device="numpy", sequence=sequence) for seed in (1, 2) for sequence in (0, 1)
    ]

    assert len({generator.bits(4).tobytes() for generator in generators}) == 4
    assert Generator(device="numpy").seed != Generator(device="numpy").seed


def test_output_array_gets_the_numbers_of_a_new_array(on_host: Generator) -> None:
    out = np.empty((4, 5))

    assert on_host.uniform(out=out) is out
    assert np.array_equal(out, Generator(5, device="numpy").uniform((4, 5), dtype="float64"))


def test_output_array_on_device_is_filled_on_the_given_stream() -> None:
    sim = Sim()
    out = cudakit.to_device(np.zeros((3, 4), np.float32), sim)
    stream = sim.stream(blocking=False)

    assert Generator(5, device=sim).uniform(out=out, stream=stream) is out
    assert out.stream == stream
    expected = Generator(5, device="numpy").uniform((3, 4))
    assert np.array_equal(out.copy_to_host(), expected)


def test_bits_fill_arrays_of_any_dtype(on_host: Generator) -> None:
    out = np.zeros(10, np.float32)
    on_host.bits(out=out)

    assert np.array_equal(out.view(np.uint32), Generator(5, device="numpy").bits(10))


# --- state


@pytest.mark.parametrize("device", ["sim", "numpy"])
def test_restored_generator_continues_with_the_same_numbers(device: str) -> None:
    generator = Generator(2**64 - 1, device="sim", sequence=7)
    generator.normal(1001)
    generator.spawn(3)
    state = json.loads(json.dumps(generator.state()))
    expected, (expected_child,) = generator.bits(50).copy_to_host(), generator.spawn(1)

    restored = Generator(device=device)
    restored.restore(state)

    numbers = restored.bits(50)
    numbers = numbers if device == "numpy" else numbers.copy_to_host()
    assert np.array_equal(numbers, expected)
    assert restored.spawn(1)[0].seed == expected_child.seed


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"algorithm": "philox4x64-10"},
        {"seed": -1},
        {"seed": 2**64},
        {"sequence": 2**48},
        {"position": "0"},
        {"position": True},
        {"spawned": None},
    ],
)
def test_invalid_state_is_rejected_and_changes_nothing(
    change: dict[str, Any], on_host: Generator
) -> None:
    before = on_host.state()
    with pytest.raises(InputError):
        on_host.restore(before | change)
    assert on_host.state() == before


@given(st.integers(0, 2**40), st.integers(-(2**20), 2**20))
def test_advance_skips_blocks(position: int, blocks: int) -> None:
    generator = Generator(3, device="numpy")
    generator.advance(position)
    if position + blocks < 0:
        with pytest.raises(UsageError, match="position"):
            generator.advance(blocks)
        return
    generator.advance(blocks)

    assert generator.position == position + blocks


def test_advance_skips_the_numbers_of_a_call(on_host: Generator) -> None:
    skipped = Generator(5, device="numpy")
    on_host.bits(400)
    skipped.advance(100)

    assert np.array_equal(on_host.bits(8), skipped.bits(8))


def test_jump_selects_another_sequence(on_host: Generator) -> None:
    on_host.jump(3)

    assert on_host.sequence == 3
    assert np.array_equal(on_host.bits(8), Generator(5, device="numpy", sequence=3).bits(8))
    with pytest.raises(UsageError, match="sequence"):
        on_host.jump(-4)


def test_spawned_generators_have_different_seeds(on_device: Generator) -> None:
    first, second = on_device.spawn(2)
    (third,) = on_device.spawn(1)
    (grandchild,) = first.spawn(1)

    assert len({child.seed for child in (on_device, first, second, third, grandchild)}) == 5
    assert isinstance(first.bits(1), DeviceArray)
    assert [child.seed for child in Generator(5, device="numpy").spawn(3)] == [
        first.seed,
        second.seed,
        third.seed,
    ]


def test_threads_draw_different_numbers_from_one_generator(on_host: Generator) -> None:
    drawn: list[bytes] = []
    threads = [Thread(target=lambda: drawn.append(on_host.bits(4).tobytes())) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(drawn)) == 20
    assert on_host.position == 20


# --- CUDA graphs


class CapturedCalls:
    """A graph of two calls of a generator on a simulated device, after one call without a graph."""

    def __init__(self) -> None:
        self.sim = Sim()
        self.generator = Generator(5, device=self.sim, sequence=3)
        self.stream = self.sim.stream()
        self.generator.bits(16, stream=self.stream)
        self.outputs = [cudakit.to_device(np.zeros(8, np.float32), self.sim) for _ in range(2)]
        self.sim.capture_begin(self.stream)
        for out in self.outputs:
            self.generator.uniform(out=out, stream=self.stream)
        self.executable = self.sim.instantiate(self.sim.capture_end(self.stream))

    def replay(self) -> list[float]:
        """Return the numbers of one replay."""
        self.sim.graph_launch(self.executable, self.stream)
        self.sim.sync()
        return [number for out in self.outputs for number in out.copy_to_host(self.stream).tolist()]


def test_replays_of_a_graph_continue_the_sequence() -> None:
    graph, counterpart = CapturedCalls(), Generator(5, device="numpy", sequence=3)
    counterpart.bits(16)

    assert graph.generator.position == counterpart.position == 4
    for _ in range(3):
        assert graph.replay() == counterpart.uniform(16).tolist()
    eager = graph.generator.normal(out=graph.outputs[0], stream=graph.stream)
    assert eager.copy_to_host().tolist() == counterpart.normal(8).tolist()
    assert graph.replay() == counterpart.uniform(16).tolist()
    assert graph.generator.state() == counterpart.state()


def test_state_of_a_captured_generator_is_restored_for_replays_and_calls() -> None:
    graph = CapturedCalls()
    state = graph.generator.state()
    first = graph.replay()
    assert graph.replay() != first

    graph.generator.restore(state)
    assert graph.replay() == first
    assert graph.generator.state() != state
    graph.generator.restore(Generator(7, device="numpy").state())
    assert graph.replay() == Generator(7, device="numpy").uniform(16).tolist()
    graph.generator.advance(-4)
    graph.generator.jump(5)

    counterpart = Generator(7, device="numpy", sequence=5)
    assert graph.replay() == counterpart.uniform(16).tolist()
    assert (graph.generator.seed, graph.generator.sequence) == (7, 5)
    assert "position=on the device" in repr(graph.generator)
    assert [child.seed for child in graph.generator.spawn(2)] == [
        c.seed for c in counterpart.spawn(2)
    ]


def test_advance_past_the_end_changes_no_counter_in_device_memory() -> None:
    graph = CapturedCalls()

    with pytest.raises(UsageError, match="position must be an integer"):
        graph.generator.advance(-5)
    assert graph.generator.position == 4


# --- invalid arguments


def test_new_array_is_refused_during_a_capture() -> None:
    sim = Sim()
    generator, stream = Generator(1, device=sim), sim.stream()
    sim.capture_begin(stream)
    with pytest.raises(UsageError, match="a new array cannot be allocated") as raised:
        generator.uniform(4, stream=stream)
    sim.capture_end(stream)

    assert raised.value.hint == "pass out="
    assert generator.position == 0


def test_array_of_another_device_is_rejected() -> None:
    out = cudakit.to_device(np.zeros(4, np.float32), Sim())

    with pytest.raises(UsageError, match="out is in memory of"):
        Generator(1, device=Sim()).uniform(out=out)


def test_misaligned_array_is_rejected(on_device: Generator) -> None:
    out = cudakit.to_device(np.zeros(4, np.float32), "sim")
    out.view = replace(out.view, ptr=Ptr(out.ptr + 1), shape=(2,))

    with pytest.raises(UsageError, match="misaligned: float32 at address"):
        on_device.uniform(out=out)
    assert on_device.position == 0


def test_host_array_is_rejected_by_generator_of_a_device(on_device: Generator) -> None:
    with pytest.raises(UsageError, match="out"):
        on_device.uniform(out=np.zeros(4, np.float32))


def test_device_array_and_stream_are_rejected_by_generator_of_numpy(on_host: Generator) -> None:
    with pytest.raises(UsageError, match="not a numpy array"):
        on_host.uniform(out=cudakit.to_device([1.0], "sim"))
    with pytest.raises(UsageError, match="no streams"):
        on_host.uniform(3, stream=Stream(1))


def test_arrays_that_cannot_be_filled_are_rejected(on_host: Generator) -> None:
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    for out, reason in (
        (np.zeros((4, 4))[:, ::2], "not contiguous"),
        (read_only, "read-only"),
        (np.zeros(4, np.int64), "cannot give int64"),
    ):
        with pytest.raises(UsageError, match=reason):
            on_host.uniform(out=out)
    assert on_host.position == 0


@pytest.mark.parametrize("shape", [-1, (2, -3), 1.5, "3", None, 2**63])
def test_invalid_shape_is_rejected(shape: Any, on_host: Generator) -> None:
    with pytest.raises(UsageError, match=r"shape"):
        on_host.uniform(shape)


def test_array_in_place_of_shape_is_rejected_with_a_hint(on_host: Generator) -> None:
    with pytest.raises(UsageError, match="not array") as caught:
        on_host.uniform(np.zeros(3))

    assert caught.value.hint == "pass an array as out="


def test_shape_and_dtype_must_be_those_of_the_output_array(on_host: Generator) -> None:
    with pytest.raises(UsageError, match=r"shape \(4,\), not \(5,\)"):
        on_host.uniform(5, out=np.zeros(4))
    with pytest.raises(UsageError, match="dtype float64, not float32"):
        on_host.uniform(out=np.zeros(4), dtype="float32")
    assert on_host.uniform(4, out=np.zeros(4), dtype=np.float64).shape == (4,)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"sequence": 2**48}, r"0 to 2\^48 - 1"),
        ({"device": "gpu"}, "gpu"),
    ],
)
def test_invalid_generator_is_rejected(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Generator(**{"device": "numpy"} | options)


def test_arguments_that_are_not_numbers_are_rejected(on_host: Generator) -> None:
    with pytest.raises(UsageError, match=r"low must be an integer, not 0\.5"):
        on_host.integers(0.5, 3, 10)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="high must be a number, not None"):
        on_host.uniform(3, high=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="std must be a number"):
        on_host.normal(3, std="wide")  # type: ignore[arg-type]
    assert on_host.position == 0


def test_invalid_dtypes_are_rejected(on_host: Generator) -> None:
    with pytest.raises(UsageError, match="not a dtype"):
        on_host.uniform(3, dtype="half-float")
    with pytest.raises(UsageError, match="integer dtype"):
        on_host.bits(3, dtype="float32")


@pytest.mark.parametrize("device", ["sim", "numpy"])
def test_empty_array_uses_no_numbers(device: str) -> None:
    generator = Generator(1, device=device)

    for method in (*METHODS, "permutation"):
        assert draw(generator, method, 0).shape == (0,)
    assert generator.position == 0


def test_examples_of_the_generator_run() -> None:
    results = doctest.testmod(
        __import__("cudakit.arrays.generator", fromlist=["Generator"]),
        extraglobs={"cudakit": cudakit},
    )

    assert results.attempted >= 10
    assert results.failed == 0


def test_unknown_device_is_refused_with_all_kinds_of_devices() -> None:
    with pytest.raises(UsageError, match="unknown GPU choice 'foo'") as refused:
        Generator(1, device="foo")

    for kind in ("auto", "cuda", "sim:MODEL", "numpy"):
        assert kind in refused.value.hint
