"""GEMMs of each library on a real device, compared with numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import pytest

from cudakit.errors import Unsupported
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import FP32, FP64, INT32, Element, decode, encode
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    EPILOGUES,
    LAYOUTS,
    LIBRARIES,
    Algorithm,
    Blas,
    Gemm,
    GemmPlan,
    GemmSettings,
    Library,
    Matrix,
)
from cudakit.gpu.open import open_gpu
from cudakit.units import Unavailable

pytestmark = pytest.mark.gpu

M, N, K = 64, 48, 32
USUAL = GemmSettings()
# Types that every library must support.
MUST_WORK = ("fp32", "tf32", "fp16", "bf16")
# Machine epsilon: twice the relative rounding error.
STEPS = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp8_e4m3": 2.0**-3, "fp8_e5m2": 2.0**-2}
# GELU in tanh form, with the approximate tanh of the device.
GELU_ERROR = 2e-3
TF32_ERROR = 2.0**-10


@dataclass(frozen=True, slots=True)
class Operands:
    a: Ptr
    b: Ptr
    d: Ptr
    bias: Ptr


class Bench:
    """A GEMM on a device: operands, expected and actual result."""

    def __init__(self, gpu: Gpu, gemm: Gemm, cleanup: ExitStack) -> None:
        self.gpu, self.gemm, self._cleanup = gpu, gemm, cleanup
        self.stream: Stream = gpu.stream(blocking=False)
        cleanup.callback(gpu.destroy_stream, self.stream)
        random = np.random.default_rng(3)
        a, b = (self._values(random, matrix) for matrix in (gemm.a, gemm.b))
        bias = random.integers(-2, 3, gemm.m).astype(np.float64)
        self.expected = _expected(gemm, a, b, bias)
        self.operands = Operands(
            a=self._upload(_stored(a, gemm.a), gemm.a.element),
            b=self._upload(_stored(b, gemm.b), gemm.b.element),
            d=self._upload(np.zeros(gemm.d.elements), gemm.d.element),
            bias=self._upload(bias, gemm.bias),
        )

    def check(self, product: GemmPlan) -> None:
        """Compute on a stream, and compare D."""
        self.poison()
        product.enqueue(self.operands, self.stream)
        self.gpu.sync_stream(self.stream)
        self.compare()

    def poison(self) -> None:
        self.gpu.fill(self.operands.d, 0xFF, self.gemm.d.size_bytes, self.stream)

    def compare(self) -> None:
        d, gemm = self.gemm.d, self.gemm
        algorithms = self.read(self.operands.d, d)
        step = STEPS.get(gemm.output, 2.0**-22)
        gelu = GELU_ERROR if gemm.epilogue.startswith("gelu") else 0.0
        tf32 = TF32_ERROR if gemm.dtype == "tf32" else 0.0
        np.testing.assert_allclose(algorithms, self.expected, rtol=step + tf32, atol=gelu + 1e-6)

    def _values(self, random: np.random.Generator, matrix: Matrix) -> npt.NDArray[np.float64]:
        shape = (matrix.batch, matrix.rows, matrix.columns)
        return random.integers(-2, 3, shape).astype(np.float64)

    def _upload(self, values: npt.NDArray[np.float64], element: Element) -> Ptr:
        octets = encode(values, element).tobytes()
        address, pinned = self.gpu.malloc(len(octets)), self.gpu.host_malloc(len(octets))
        self._cleanup.callback(self.gpu.free, address)
        self.gpu.host_view(pinned, len(octets))[:] = octets
        self.gpu.copy(address, pinned, len(octets), self.stream)
        self.gpu.sync_stream(self.stream)
        self.gpu.host_free(pinned)
        return address

    def read(self, address: Ptr, matrix: Matrix) -> npt.NDArray[np.float64]:
        pinned = self.gpu.host_malloc(matrix.size_bytes)
        self.gpu.copy(pinned, address, matrix.size_bytes, self.stream)
        self.gpu.sync_stream(self.stream)
        octets = bytes(self.gpu.host_view(pinned, matrix.size_bytes))
        self.gpu.host_free(pinned)
        bits = np.frombuffer(octets, matrix.element.storage_dtype)
        columns = bits.reshape(matrix.batch, matrix.columns, matrix.leading)
        return decode(columns[:, :, : matrix.rows], matrix.element).transpose(0, 2, 1)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with closing(open_gpu("cuda")) as gpu:
        yield gpu


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def opened(gpu: Gpu) -> Iterator[Callable[[Library], Blas]]:
    """Open each library once; tests may run in any order."""
    libraries: dict[str, Blas] = {}
    with ExitStack() as stack:

        def library(name: Library) -> Blas:
            package = name if name in ("torch", "cupy") else "nvmath"
            pytest.importorskip(package, reason=f"{package} is not installed")
            if name not in libraries:
                libraries[name] = stack.enter_context(closing(gpu.blas(name)))
            return libraries[name]

        yield library


@pytest.fixture(params=LIBRARIES)
def blas(request: pytest.FixtureRequest, opened: Callable[[Library], Blas]) -> Blas:
    return opened(request.param)


@pytest.fixture
def lt(opened: Callable[[Library], Blas]) -> Blas:
    return opened("cublaslt")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_gemm_matches_numpy(
    gpu: Gpu, blas: Blas, cleanup: ExitStack, dtype: str, layout: str, epilogue: str
) -> None:
    gemm = Gemm(dtype=dtype, m=M, n=N, k=K, layout=layout, epilogue=epilogue)
    _check_or_skip(gpu, blas, cleanup, gemm)


@pytest.mark.parametrize(
    "output", ["", *sorted({e.name for t in DATA_TYPES.values() for e in t.outputs})]
)
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_every_output_is_right(
    gpu: Gpu, blas: Blas, cleanup: ExitStack, dtype: str, output: str
) -> None:
    if output and output not in {element.name for element in DATA_TYPES[dtype].outputs}:
        pytest.skip("not of this data type")
    for accumulate in DATA_TYPES[dtype].accumulators:
        gemm = Gemm(dtype=dtype, m=M, n=N, k=K, output=output, accumulate=accumulate)
        _check_or_skip(gpu, blas, cleanup, gemm)


@pytest.mark.parametrize(("batch", "padding"), [(3, 0), (1, 16), (3, 16)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_batches_and_padding_are_right(
    gpu: Gpu, blas: Blas, cleanup: ExitStack, dtype: str, layout: str, batch: int, padding: int
) -> None:
    gemm = Gemm(dtype=dtype, m=M, n=N, k=K, layout=layout, batch=batch, padding=padding)
    _check_or_skip(gpu, blas, cleanup, gemm)


@pytest.mark.parametrize(
    "settings",
    [
        GemmSettings(reduced_precision=False),
        GemmSettings(deterministic=True),
        GemmSettings(fast_accumulate=True),
        GemmSettings(workspace_bytes=0),
    ],
    ids=["full precision", "deterministic", "fast", "no workspace"],
)
@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_settings_do_not_change_integer_results(
    gpu: Gpu, blas: Blas, cleanup: ExitStack, dtype: str, settings: GemmSettings
) -> None:
    _check_or_skip(gpu, blas, cleanup, Gemm(dtype=dtype, m=M, n=N, k=K), settings)


@pytest.mark.parametrize("dtype", MUST_WORK)
def test_common_gemm_is_refused_by_no_library(
    gpu: Gpu, blas: Blas, cleanup: ExitStack, dtype: str
) -> None:
    if dtype == "bf16" and blas.library == "cupy":
        pytest.skip("only with ml_dtypes, and tried elsewhere")
    bench = Bench(gpu, Gemm(dtype=dtype, m=M, n=N, k=K), cleanup)
    bench.check(_ready(blas, bench.gemm, cleanup))


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_cublaslt_has_every_type_on_hopper(
    gpu: Gpu, lt: Blas, cleanup: ExitStack, dtype: str
) -> None:
    if gpu.facts().fields.get("compute_capability") != "9.0":
        pytest.skip("not a Hopper")
    bench = Bench(gpu, Gemm(dtype=dtype, m=M, n=N, k=K), cleanup)
    bench.check(_ready(lt, bench.gemm, cleanup))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cublaslt_has_every_epilogue_of_bf16(
    gpu: Gpu, lt: Blas, cleanup: ExitStack, layout: str, epilogue: str
) -> None:
    gemm = Gemm(dtype="bf16", m=M, n=N, k=K, layout=layout, epilogue=epilogue)
    bench = Bench(gpu, gemm, cleanup)
    bench.check(_ready(lt, gemm, cleanup))


def test_captured_gemm_can_be_replayed(gpu: Gpu, blas: Blas, cleanup: ExitStack) -> None:
    bench = Bench(gpu, Gemm(dtype="fp16", m=M, n=N, k=K), cleanup)
    product = _ready(blas, bench.gemm, cleanup)
    bench.check(product)
    gpu.capture_begin(bench.stream)
    if blas.library == "cupy":
        with pytest.raises(Unsupported, match="capture"):
            product.enqueue(bench.operands, bench.stream)
        gpu.destroy_graph(gpu.capture_end(bench.stream))
        return
    product.enqueue(bench.operands, bench.stream)
    graph = gpu.capture_end(bench.stream)
    cleanup.callback(gpu.destroy_graph, graph)
    executable = gpu.instantiate(graph)
    cleanup.callback(gpu.destroy_graph_exec, executable)
    bench.poison()
    gpu.graph_launch(executable, bench.stream)
    gpu.sync_stream(bench.stream)
    bench.compare()


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_heuristic_algorithm_is_rebuilt_from_numbers(
    gpu: Gpu, lt: Blas, cleanup: ExitStack, dtype: str
) -> None:
    bench = Bench(gpu, Gemm(dtype=dtype, m=512, n=512, k=512), cleanup)
    proposed = lt.heuristics(bench.gemm, USUAL, 16)
    assert proposed
    assert lt.prepare(bench.gemm, USUAL).algorithm == proposed[0]
    for algorithm in proposed:
        product = _ready(lt, bench.gemm, cleanup, algorithm)
        assert _configuration(product.algorithm) == _configuration(algorithm)
        bench.check(product)


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_every_yielded_configuration_is_correct(
    gpu: Gpu, lt: Blas, cleanup: ExitStack, dtype: str
) -> None:
    bench = Bench(gpu, Gemm(dtype=dtype, m=256, n=256, k=128), cleanup)
    algorithms = list(islice(lt.algorithms(bench.gemm, USUAL), 2000))
    assert len(algorithms) > 10
    assert len(set(algorithms)) == len(algorithms)
    # Some architectures have a single fp8 algorithm.
    assert len({listed.id for listed in algorithms}) > (not dtype.startswith("fp8"))
    for algorithm in _sampled(algorithms, 40):
        with closing(lt.prepare(bench.gemm, USUAL, algorithm)) as product:
            bench.check(product)


def test_heuristic_algorithms_are_among_all_algorithms(lt: Blas) -> None:
    gemm = Gemm(dtype="bf16", m=1024, n=1024, k=1024)
    configurations = {_configuration(listed) for listed in lt.algorithms(gemm, USUAL)}
    proposed = lt.heuristics(gemm, USUAL, 8)
    assert any(_configuration(listed) in configurations for listed in proposed)


def test_deterministic_gemm_is_bitwise_reproducible(
    gpu: Gpu, blas: Blas, cleanup: ExitStack
) -> None:
    settings = GemmSettings(deterministic=True)
    bench = Bench(gpu, Gemm(dtype="fp32", m=M, n=N, k=16 * K), cleanup)
    try:
        product = cleanup.enter_context(closing(blas.prepare(bench.gemm, settings)))
    except Unsupported as error:
        pytest.skip(error.message)
    results = []
    for _ in range(5):
        bench.check(product)
        results.append(bench.read(bench.operands.d, bench.gemm.d).tobytes())
    assert len(set(results)) == 1


def test_torch_settings_are_restored(gpu: Gpu, cleanup: ExitStack) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision(), torch.cuda.current_stream()
    bench = Bench(gpu, Gemm(dtype="tf32", m=M, n=N, k=K), cleanup)
    with closing(gpu.blas("torch")) as blas:
        bench.check(_ready(blas, bench.gemm, cleanup))
        after = torch.get_float32_matmul_precision(), torch.cuda.current_stream()
    assert after == before


def _check_or_skip(
    gpu: Gpu, blas: Blas, cleanup: ExitStack, gemm: Gemm, settings: GemmSettings = USUAL
) -> None:
    try:
        product = cleanup.enter_context(closing(blas.prepare(gemm, settings)))
        Bench(gpu, gemm, cleanup).check(product)
    except Unsupported as error:
        pytest.skip(error.message)


def _ready(
    blas: Blas, gemm: Gemm, cleanup: ExitStack, algorithm: Algorithm | None = None
) -> GemmPlan:
    return cleanup.enter_context(closing(blas.prepare(gemm, USUAL, algorithm)))


def _configuration(algorithm: Algorithm | Unavailable) -> Algorithm:
    """Return the algorithm without its workspace size, which heuristics and check may compute differently."""
    assert isinstance(algorithm, Algorithm)
    return replace(algorithm, workspace_bytes=0)


def _sampled(algorithms: Sequence[Algorithm], max_count: int) -> Sequence[Algorithm]:
    return algorithms[:: max(len(algorithms) // max_count, 1)]


def _stored(values: npt.NDArray[np.float64], matrix: Matrix) -> npt.NDArray[np.float64]:
    """Return matrices in column-major order, with padding."""
    columns = np.zeros((matrix.batch, matrix.columns, matrix.leading))
    columns[:, :, : matrix.rows] = values.transpose(0, 2, 1)
    return columns.ravel()


def _expected(
    gemm: Gemm,
    a: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
    bias: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    operand_a = a if gemm.layout[0] == "n" else a.transpose(0, 2, 1)
    operand_b = b if gemm.layout[1] == "n" else b.transpose(0, 2, 1)
    sums = operand_a @ operand_b + (bias[None, :, None] if gemm.has_bias else 0)
    if gemm.epilogue.startswith("relu"):
        sums = np.maximum(sums, 0)
    if gemm.epilogue.startswith("gelu"):
        inner = np.sqrt(2 / np.pi) * (sums + 0.044715 * sums**3)
        sums = sums * (1 + np.tanh(inner)) / 2
    if gemm.d.element in (FP64, FP32, INT32):
        return sums
    return decode(encode(sums, gemm.d.element), gemm.d.element)
