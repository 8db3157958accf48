"""The fix in the terms of the framework that took part."""

from __future__ import annotations

import pytest
from core.sanitize.made import found, kernel, race, side, work

from cudakit.core.sanitize.frameworks import FRAMEWORKS, remedies
from cudakit.core.sanitize.races import Operation, RaceKind
from cudakit.document import Frame
from cudakit.trace.kinds import Kind, Mode


@pytest.mark.parametrize(
    ("kind", "current", "previous", "remedy"),
    [
        (
            RaceKind.READ_AFTER_WRITE,
            kernel(),
            work(),
            "torch: b.wait_stream(a), where a is stream 7 and b is the legacy default stream",
        ),
        (
            RaceKind.REUSE,
            kernel(),
            work(mode=Mode.READ),
            "torch: tensor.record_stream(a) before the tensor is dropped, where a is stream 7",
        ),
        (
            RaceKind.USE_AFTER_FREE,
            kernel(),
            work(Kind.FREE),
            "torch: tensor.record_stream(a) before the tensor is dropped, where a is the legacy "
            "default stream",
        ),
        (
            RaceKind.HOST,
            work(stream=0, site=2),
            work(),
            "torch: a.synchronize(), or event.synchronize(), or a copy with non_blocking=False, "
            "where a is stream 7",
        ),
        (
            RaceKind.WRITE_AFTER_WRITE,
            kernel(graph=2, node=3, stream=7),
            work(graph=2, node=2),
            "torch: b.wait_stream(a), where a is the stream of the earlier one and b is that of the "
            "later one",
        ),
    ],
)
def test_torch_is_told_in_its_own_terms(
    kind: RaceKind, current: Operation, previous: Operation, remedy: str
) -> None:
    assert remedies(kind, side(current), side(previous)) == (remedy,)


@pytest.mark.parametrize(
    ("name", "kernel_name", "file"),
    [
        ("torch", "", "/v/site-packages/torch/cuda/streams.py"),
        ("torch", "", "/v/site-packages/triton/runtime/jit.py"),
        ("torch", "void at::native::fill<float>(float*)", ""),
        ("torch", "triton_poi_fused_add_0", ""),
        ("CuPy", "", "/v/site-packages/cupy/_core/core.py"),
        ("CuPy", "cupy_add__float32_float_float32", ""),
        ("Numba", "", "/v/site-packages/numba_cuda/numba/cuda/dispatcher.py"),
        ("Numba", "cudapy::__main__::add[abi:v1](Array<float>)", ""),
        ("JAX", "", "/v/site-packages/jax/_src/api.py"),
        ("cuda.core", "", "/v/site-packages/cuda/core/_stream.py"),
        ("cudakit", "", "/src/cudakit/gpu/sim/device.py"),
    ],
)
def test_a_framework_is_known_by_its_kernels_and_its_files(
    name: str, kernel_name: str, file: str
) -> None:
    current = side(kernel(kernel_name, site=0))
    frames = (Frame("f", file, 1),) if file else ()

    (remedy,) = remedies(RaceKind.READ_AFTER_WRITE, current, side(work(site=0)), frames)
    assert remedy.startswith(f"{name}: ")


def test_a_program_without_a_framework_gets_the_general_fix_alone() -> None:
    plain = found(race(current=kernel("add", site=1)))

    assert plain.remedies == ()
    assert plain.hint


@pytest.mark.parametrize("kind", RaceKind)
def test_every_framework_has_a_fix_for_every_kind(kind: RaceKind) -> None:
    frames = tuple(Frame("f", f"/v/{name}/x.py", 1) for name in ("torch", "cupy", "numba", "jax"))
    said = remedies(kind, side(kernel("add", site=0)), side(work(site=0)), frames)

    assert len(said) == 4
    assert all(" a " not in remedy or "where a" in remedy or "a copy" in remedy for remedy in said)


def test_no_two_frameworks_have_one_name() -> None:
    assert len({framework.name for framework in FRAMEWORKS}) == len(FRAMEWORKS)
