"""``cudakit.Generator`` on a GPU: arrays of each library, and the sequences of cuRAND and torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import cudakit
from cudakit import Generator
from cudakit.arrays.random_values import philox
from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.arrays import shared_device
from cudakit.gpu.device_array import DeviceArray

pytestmark = pytest.mark.gpu

SEED = 0x0123456789ABCDEF
FLOATS = ("float64", "float32", "float16", "bfloat16")

CURAND = r"""
#include <curand_kernel.h>

extern "C" __global__ void words(uint4* out, unsigned long long seed, unsigned long long subsequence,
                                 unsigned long long offset, int count) {
    curandStatePhilox4_32_10_t state;
    curand_init(seed, subsequence, offset, &state);
    for (int i = 0; i < count; ++i) out[i] = curand4(&state);
}
extern "C" __global__ void normals(float4* out, unsigned long long seed, unsigned long long subsequence,
                                   unsigned long long offset, int count) {
    curandStatePhilox4_32_10_t state;
    curand_init(seed, subsequence, offset, &state);
    for (int i = 0; i < count; ++i) out[i] = curand_normal4(&state);
}
extern "C" __global__ void wide_normals(double2* out, unsigned long long seed, unsigned long long subsequence,
                                        unsigned long long offset, int count) {
    curandStatePhilox4_32_10_t state;
    curand_init(seed, subsequence, offset, &state);
    for (int i = 0; i < count; ++i) out[i] = curand_normal2_double(&state);
}
extern "C" __global__ void wide_uniforms(double2* out, unsigned long long seed,
                                         unsigned long long subsequence,
                                         unsigned long long offset, int count) {
    curandStatePhilox4_32_10_t state;
    curand_init(seed, subsequence, offset, &state);
    for (int i = 0; i < count; ++i) out[i] = curand_uniform2_double(&state);
}
"""


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


def numpy_generator(**options: Any) -> Generator:
    return Generator(SEED, device="numpy", **options)


# --- arrays of libraries


@pytest.mark.parametrize("method", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tensor_gets_the_numbers_of_numpy(torch: Any, method: str, dtype: str) -> None:
    tensor = torch.empty((1001, 7), dtype=getattr(torch, dtype), device="cuda")

    assert getattr(Generator(SEED), method)(out=tensor) is tensor

    expected = getattr(numpy_generator(), method)((1001, 7), dtype=dtype)
    assert np.array_equal(tensor.to(torch.float64).cpu().numpy(), expected.astype(np.float64))


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_misaligned_tensor_gets_the_same_numbers(torch: Any, skipped: int) -> None:
    tensor = torch.zeros(1000, device="cuda")

    Generator(SEED).uniform(out=tensor[skipped:])

    assert np.array_equal(tensor[skipped:].cpu().numpy(), numpy_generator().uniform(1000 - skipped))
    assert not tensor[:skipped].any()


def test_tensor_is_filled_on_the_current_stream_of_torch(torch: Any) -> None:
    tensor, copied = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        Generator(SEED).uniform(out=tensor)
        copied.copy_(tensor)
    stream.synchronize()

    assert np.array_equal(copied.cpu().numpy(), numpy_generator().uniform(1 << 20))


def test_cupy_array_gets_the_numbers_of_numpy(cupy: Any) -> None:
    array = cupy.empty((33, 5), np.int32)

    Generator(SEED).integers(-7, 1000, out=array, stream=cupy.cuda.Stream(non_blocking=True))
    cudakit.synchronize()

    assert np.array_equal(array.get(), numpy_generator().integers(-7, 1000, (33, 5), dtype="int32"))


def test_new_array_is_shared_with_torch_and_cupy(torch: Any, cupy: Any) -> None:
    array = Generator(SEED).permutation(1000)

    expected = numpy_generator().permutation(1000)
    assert isinstance(array, DeviceArray)
    assert np.array_equal(torch.from_dlpack(array).cpu().numpy(), expected)
    assert np.array_equal(cupy.asarray(array).get(), expected)


def test_array_of_another_device_is_rejected(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with pytest.raises(UsageError, match="memory of cuda:1, the generator is on cuda:0"):
        Generator(SEED, device=0).uniform(out=torch.empty(4, device="cuda:1"))


def test_replays_of_a_graph_of_torch_continue_the_sequence(torch: Any) -> None:
    generator, counterpart = Generator(SEED), numpy_generator()
    tensors = [torch.empty(100, device="cuda") for _ in range(2)]
    generator.uniform(out=tensors[0])
    counterpart.uniform(100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for tensor in tensors:
            generator.uniform(out=tensor)
            tensor.mul_(2)

    assert generator.position == counterpart.position
    state = generator.state()
    for _ in range(3):
        graph.replay()
        for tensor in tensors:
            assert np.array_equal(tensor.cpu().numpy(), 2 * counterpart.uniform(100))
    generator.normal(out=tensors[0])
    assert np.array_equal(tensors[0].cpu().numpy(), counterpart.normal(100))
    assert generator.state() == counterpart.state()
    generator.restore(state)
    counterpart.restore(state)
    graph.replay()
    assert np.array_equal(tensors[0].cpu().numpy(), 2 * counterpart.uniform(100))


def test_first_call_can_be_captured_with_arrays_of_cudakit(torch: Any) -> None:
    generator, counterpart = Generator(SEED), numpy_generator()
    out = cudakit.to_device(np.zeros(64, np.float64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        generator.normal(out=out, stream=torch.cuda.current_stream())
        with pytest.raises(UsageError, match="a new array cannot be allocated"):
            generator.normal(64, stream=torch.cuda.current_stream())
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert np.array_equal(out.copy_to_host(), counterpart.normal(64, dtype="float64"))


def test_repeated_calls_give_the_numbers_of_numpy(torch: Any, cupy: Any) -> None:
    generator, counterpart = Generator(SEED), numpy_generator()
    tensor, array = torch.empty(1000, device="cuda"), cupy.empty((10, 100), np.float64)
    for _ in range(3):
        assert generator.uniform(low=-1, out=tensor) is tensor
        assert np.array_equal(tensor.cpu().numpy(), counterpart.uniform(1000, low=-1))
        assert generator.normal(out=array) is array
        assert np.array_equal(array.get().ravel(), counterpart.normal(1000, dtype="float64"))
        assert np.array_equal(
            generator.integers(0, 9, 50).copy_to_host(), counterpart.integers(0, 9, 50)
        )
    with pytest.raises(UsageError, match="low must be an integer"):
        generator.integers(0.0, 9, 50)
    with pytest.raises(UsageError, match="out has shape"):
        generator.uniform((10,), low=-1, out=tensor)
    assert generator.state() == counterpart.state()


# --- large arrays


@pytest.mark.parametrize("method", ["bits", "uniform", "normal"])
def test_many_numbers_equal_those_of_numpy(method: str) -> None:
    count = 5_000_003
    on_gpu = getattr(Generator(SEED), method)(count).copy_to_host()

    assert on_gpu.tobytes() == getattr(numpy_generator(), method)(count).tobytes()


# --- cuRAND


@pytest.fixture(scope="module")
def curand(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., npt.NDArray[Any]]:
    """Return a function that runs a kernel of cuRAND, compiled by nvcc."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc and the headers of cuRAND")
    folder = Path(tmp_path_factory.mktemp("curand"))
    source, image = folder / "curand.cu", folder / "curand.cubin"
    source.write_text(CURAND)
    target = "sm_{}{}".format(*cudakit.capability()[:2])
    done = subprocess.run(
        [nvcc, "-cubin", f"-arch={target}", "-o", str(image), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"nvcc cannot compile cuRAND: {done.stderr[-300:]}")
    gpu = shared_device(0)
    module = gpu.load(image.read_bytes())

    def run(name: str, dtype: str, blocks: int, subsequence: int, offset: int) -> Any:
        array = DeviceArray(gpu, dtype, (blocks * 16 // np.dtype(dtype).itemsize,), LEGACY)
        numbers = (np.uint64(value) for value in (SEED, subsequence, offset))
        args = (Ptr(array.ptr), *numbers, np.int32(blocks))
        gpu.launch(gpu.kernel(module, name), (1, 1, 1), (1, 1, 1), args, LEGACY)
        return array.copy_to_host()

    return run


@pytest.mark.parametrize(("sequence", "position"), [(0, 0), (3, 10), (2**47 + 5, 2**40 - 100)])
def test_bits_are_those_of_curand(curand: Callable[..., Any], sequence: int, position: int) -> None:
    generator = Generator(SEED, sequence=sequence)
    generator.advance(position)

    words = curand("words", "uint32", 1000, sequence, 4 * position)

    assert np.array_equal(generator.bits(4000).copy_to_host(), words)


def test_normal_values_differ_from_those_of_curand_by_documented_bounds(
    curand: Callable[..., Any],
) -> None:
    single = Generator(SEED, sequence=3).normal(80_000).copy_to_host()
    assert np.abs(single - curand("normals", "float32", 20_000, 3, 0)).max() < 1e-5

    double = Generator(SEED, sequence=3).normal(40_000, dtype="float64").copy_to_host()
    assert np.abs(double - curand("wide_normals", "float64", 20_000, 3, 0)).max() < 1e-14


def test_uniform_doubles_are_those_of_curand_less_half_a_step(curand: Callable[..., Any]) -> None:
    values = Generator(SEED, sequence=3).uniform(40_000, dtype="float64").copy_to_host()

    assert np.array_equal(values + 2.0**-54, curand("wide_uniforms", "float64", 20_000, 3, 0))


# --- torch


def first_words(count: int, offset: int) -> npt.NDArray[np.uint32]:
    """Return the word that each thread of torch's kernel takes first: one sequence for each thread."""
    return np.array([philox(offset // 4, 1, thread, SEED)[0, 0] for thread in range(count)])


def test_torch_rand_takes_one_sequence_for_each_thread(torch: Any) -> None:
    device_generator = torch.Generator("cuda").manual_seed(SEED)
    torch.rand(1000, device="cuda", generator=device_generator)
    offset = device_generator.get_offset()

    values = torch.rand(1000, device="cuda", generator=device_generator).cpu().numpy()

    words = first_words(1000, offset).astype(np.float32)
    expected = words * np.float32(2**-32) + np.float32(2**-33)
    expected[expected == 1] = 0
    assert np.array_equal(values, expected)


def test_torch_randn_takes_the_same_normal_transform(torch: Any) -> None:
    device_generator = torch.Generator("cuda").manual_seed(SEED)

    values = torch.randn(256, device="cuda", generator=device_generator).cpu().numpy()

    expected = [numpy_generator(sequence=thread).normal(1)[0] for thread in range(256)]
    assert np.abs(values - np.array(expected)).max() < 1e-5
