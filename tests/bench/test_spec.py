from __future__ import annotations

from collections.abc import Callable

import pytest

from cudakit.bench.alloc import AllocSpec
from cudakit.bench.case import Rule
from cudakit.bench.copy import DIRECTIONS, CopySpec
from cudakit.bench.gemm import GemmSpec
from cudakit.bench.graph import GraphSpec
from cudakit.bench.launch import LaunchSpec
from cudakit.bench.memory import MemorySpec
from cudakit.bench.spec import Spec
from cudakit.errors import InputError
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings

CUBE = (Gemm(dtype="bf16", m=8, n=8, k=8),)


@pytest.mark.parametrize("spec", [MemorySpec, CopySpec, LaunchSpec, AllocSpec, GraphSpec])
def test_default_specs_are_valid(spec: Callable[[], Spec]) -> None:
    assert spec().seed == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MemorySpec(sizes_bytes=(0,)), "--sizes: 0 bytes"),
        (lambda: MemorySpec(sizes_bytes=(1 << 20, -16)), "--sizes: -16 bytes"),
        (lambda: MemorySpec(sizes_bytes=(100,)), "100 bytes .* not a multiple of 16"),
        (lambda: MemorySpec(sizes_bytes=()), "list of sizes is empty"),
        (lambda: MemorySpec(operations=("add",)), "unknown operation 'add'"),
        (lambda: MemorySpec(operations=()), "no operation was given"),
        (lambda: MemorySpec(mode="call"), "unknown mode 'call'"),
        (lambda: CopySpec(sizes_bytes=(6,)), "not a multiple of 4"),
        (lambda: CopySpec(directions=()), "no direction was given"),
        (lambda: CopySpec(directions=("sideways",)), "unknown direction 'sideways'"),
        (lambda: LaunchSpec(calls=("land",)), "unknown call 'land'"),
        (lambda: AllocSpec(allocators=("mine",)), "unknown allocator 'mine'"),
        (lambda: AllocSpec(allocators=()), "no allocator was given"),
        (lambda: GraphSpec(nodes=(1, 0)), "--nodes is 0"),
        (lambda: GraphSpec(topologies=("star",)), "unknown topology"),
        (lambda: GraphSpec(steps=("skip",)), "unknown step"),
        (lambda: GemmSpec(gemms=()), "no shape was given"),
        (lambda: GemmSpec(gemms=CUBE, library="blis"), "unknown library 'blis'"),
        (lambda: GemmSpec(gemms=CUBE, baselines=("blis",)), "unknown library 'blis'"),
        (lambda: GemmSpec(gemms=CUBE, baselines=("cublaslt",)), "cublaslt cannot be compared with"),
        (
            lambda: GemmSpec(gemms=CUBE, baselines=("torch", "torch")),
            "torch cannot be compared with",
        ),
        (lambda: GemmSpec(gemms=CUBE, fill="noise"), "unknown fill 'noise'"),
        (lambda: GemmSpec(gemms=CUBE, mode="call"), "unknown mode 'call'"),
        (lambda: GemmSpec(gemms=CUBE, cache="warm"), "unknown cache 'warm'"),
        (
            lambda: GemmSpec(gemms=CUBE, settings=GemmSettings(workspace_bytes=-1)),
            "workspace is -1",
        ),
        (
            lambda: GemmSpec(gemms=CUBE, library="cublas", algorithms={CUBE[0]: Algorithm(id=1)}),
            "tuned algorithms are of cublaslt",
        ),
        (lambda: LaunchSpec(seed=-1), "--seed is -1"),
        (lambda: LaunchSpec(warmup_s=-1.0), "--warmup is -1; it must be from 0 to 3,600"),
        (lambda: LaunchSpec(budget_s=0.0), "--budget is 0; it must be a number above 0"),
        (lambda: LaunchSpec(rule=Rule(precision=0)), "--precision is 0"),
        (lambda: LaunchSpec(rule=Rule(timeout_s=float("nan"))), "--timeout is nan"),
        (lambda: LaunchSpec(rule=Rule(min_samples=0)), "--samples is 0"),
    ],
)
def test_invalid_spec_is_rejected(make: Callable[[], Spec], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_spec_error_has_hint() -> None:
    with pytest.raises(InputError) as size:
        MemorySpec(sizes_bytes=(100,))
    with pytest.raises(InputError) as name:
        CopySpec(directions=("up",))

    assert size.value.hint == "the nearest size is 96 bytes"
    assert name.value.hint == "choose from " + ", ".join(DIRECTIONS)
