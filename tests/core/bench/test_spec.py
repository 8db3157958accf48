from __future__ import annotations

from collections.abc import Callable

import pytest

from cudakit.core.bench.method import Rule
from cudakit.core.bench.spec import (
    DIRECTIONS,
    AllocSpec,
    CopySpec,
    GemmSpec,
    GraphSpec,
    LaunchSpec,
    MemorySpec,
    Spec,
)
from cudakit.errors import InputError
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings

CUBE = (Gemm(dtype="bf16", m=8, n=8, k=8),)


@pytest.mark.parametrize("spec", [MemorySpec, CopySpec, LaunchSpec, AllocSpec, GraphSpec])
def test_default_specs_are_valid(spec: Callable[[], Spec]) -> None:
    assert spec().seed == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MemorySpec(sizes_bytes=(0,)), "a size of 0 bytes"),
        (lambda: MemorySpec(sizes_bytes=(1 << 20, -16)), "a size of -16 bytes"),
        (lambda: MemorySpec(sizes_bytes=(100,)), "100 bytes .* no multiple of 16"),
        (lambda: MemorySpec(sizes_bytes=()), "list of sizes is empty"),
        (lambda: MemorySpec(operations=("add",)), "no such operation: 'add'"),
        (lambda: MemorySpec(operations=()), "no operation was asked"),
        (lambda: MemorySpec(mode="call"), "no such mode: 'call'"),
        (lambda: CopySpec(sizes_bytes=(6,)), "no multiple of 4"),
        (lambda: CopySpec(directions=()), "no direction was asked"),
        (lambda: CopySpec(directions=("sideways",)), "no such direction: 'sideways'"),
        (lambda: LaunchSpec(calls=("land",)), "no such call: 'land'"),
        (lambda: AllocSpec(allocators=("mine",)), "no such allocator: 'mine'"),
        (lambda: AllocSpec(allocators=()), "no allocator was asked"),
        (lambda: GraphSpec(nodes=(1, 0)), "the number of nodes is 0"),
        (lambda: GraphSpec(topologies=("star",)), "no such topology"),
        (lambda: GraphSpec(steps=("skip",)), "no such step"),
        (lambda: GemmSpec(gemms=()), "no product was asked"),
        (lambda: GemmSpec(gemms=CUBE, library="blis"), "no such library: 'blis'"),
        (lambda: GemmSpec(gemms=CUBE, baselines=("blis",)), "no such library: 'blis'"),
        (lambda: GemmSpec(gemms=CUBE, baselines=("cublaslt",)), "cublaslt is to be compared with"),
        (
            lambda: GemmSpec(gemms=CUBE, baselines=("torch", "torch")),
            "torch is to be compared with",
        ),
        (lambda: GemmSpec(gemms=CUBE, fill="noise"), "no such fill: 'noise'"),
        (lambda: GemmSpec(gemms=CUBE, mode="call"), "no such mode: 'call'"),
        (lambda: GemmSpec(gemms=CUBE, cache="warm"), "no such cache: 'warm'"),
        (
            lambda: GemmSpec(gemms=CUBE, settings=GemmSettings(workspace_bytes=-1)),
            "workspace is -1",
        ),
        (
            lambda: GemmSpec(gemms=CUBE, library="cublas", algorithms={CUBE[0]: Algorithm(id=1)}),
            "algorithms are cublaslt's",
        ),
        (lambda: LaunchSpec(seed=-1), "the seed is -1"),
        (lambda: LaunchSpec(warmup_s=-1.0), "the warm-up is -1, and must be from 0 to 3,600"),
        (lambda: LaunchSpec(budget_s=0.0), "the time budget is 0, and must be a number above 0"),
        (lambda: LaunchSpec(rule=Rule(precision=0)), "the precision is 0"),
        (lambda: LaunchSpec(rule=Rule(timeout_s=float("nan"))), "the timeout is nan"),
        (lambda: LaunchSpec(rule=Rule(min_samples=0)), "the number of samples is 0"),
    ],
)
def test_invalid_spec_is_refused(make: Callable[[], Spec], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_a_refusal_says_what_would_do() -> None:
    with pytest.raises(InputError) as size:
        MemorySpec(sizes_bytes=(100,))
    with pytest.raises(InputError) as name:
        CopySpec(directions=("up",))

    assert size.value.hint == "96 is one"
    assert name.value.hint == "there are " + ", ".join(DIRECTIONS)
