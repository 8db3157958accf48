"""The search for all configurations of an algorithm that cuBLASLt accepts.

What can be chosen freely is known from the algorithm's capabilities (cuBLAS Library,
"cublasLtMatmulAlgoCapAttributes_t"), but not which choices go together, nor which cluster and inner shapes
an algorithm has: that is found out by asking, with cublasLtMatmulAlgoCheck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cudakit.gpu.api.elements import BF16, FP16
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, never

# cublasLtReductionScheme_t: how the partial sums of split-k are reduced.
NO_REDUCTION, IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE = 0, 1, 2, 4
SCHEMES = (IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE)

# Split-k factors: the library takes any number, and larger ones gain nothing.
SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16)

# Least number of accepted tiles and stages that a value is tried with.
_ASKED = 16

# Returns the algorithm with the workspace that it needs; None if the library refuses it.
Accepts = Callable[[Algorithm], "Algorithm | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values that one algorithm can be configured with, the default first."""

    id: int
    tiles: Sequence[int] = (0,)
    stages: Sequence[int] = (0,)
    customs: Sequence[int] = (0,)
    swizzles: Sequence[int] = (0,)
    splits: Sequence[int] = ()
    reductions: Sequence[int] = ()
    clusters: Sequence[int] = (0,)
    inners: Sequence[int] = (0,)


def allowed_reductions(gemm: Gemm, settings: GemmSettings) -> tuple[int, ...]:
    """Return the reduction schemes that settings allow.

    Deterministic is what adds in a separate step, in an order that is fixed. In place, the parts take turns
    at D by a counter, and no document says that the turns come in the same order every time: not allowed.
    Without reduced precision the parts of a D of 16 bits are kept in the type of the sums, which only the
    scheme of the compute type does: as torch has it (aten/src/ATen/cuda/CUDABlas.cpp, where it disallows
    reduced precision but allows split-k).
    """
    refused = {IN_PLACE} if settings.deterministic else set()
    if not settings.reduced_precision and gemm.d.element in (FP16, BF16):
        refused |= {IN_PLACE, IN_OUTPUT_TYPE}
    return tuple(scheme for scheme in SCHEMES if scheme not in refused)


def configurations(choices: Choices, accepts: Accepts) -> Iterator[Algorithm | None]:
    """Yield each accepted configuration once, and None for each refused one.

    Clusters and inner shapes that none of a few tiles and stages accept are left out, and so is the choice
    where every value is accepted: then it changes nothing. Swizzles and splits are tried where the rest is
    accepted without them. Tiles and stages come first: they are found at once, and differ the most.
    """
    shapes = [
        Algorithm(id=choices.id, tile=tile, stages=stages)
        for tile, stages in product(choices.tiles, choices.stages)
    ]
    alone: list[Algorithm] = []
    for shape in shapes:
        if accepted := accepts(shape):
            alone.append(shape)
        yield accepted
    asked_of = _sampled(alone or shapes)
    clusters = _effective("cluster", choices.clusters, asked_of, accepts)
    inners = _effective("inner", choices.inners, asked_of, accepts)
    for shape, custom, cluster, inner in product(shapes, choices.customs, clusters, inners):
        asked = replace(shape, custom=custom, cluster=cluster, inner=inner)
        accepted = accepts(asked)
        yield accepted if asked != shape else None
        if accepted:
            yield from map(accepts, _variants(asked, choices))


def round_robin(
    iterators: Iterable[Iterator[Algorithm | None]], is_over: Callable[[], bool] = never
) -> Iterator[Algorithm]:
    """Yield the first of each, then the second of each, so that an early stop has seen all iterators.

    None is a turn in vain, so that nobody waits for one that finds nothing.
    """
    going = list(iterators)
    while going:
        for iterator in [*going]:
            if is_over():
                return
            try:
                found = next(iterator)
            except StopIteration:
                going.remove(iterator)
            else:
                if found:
                    yield found


def _sampled(shapes: Sequence[Algorithm]) -> Sequence[Algorithm]:
    """Choose a few from first to last: trying all takes seconds per algorithm."""
    return shapes[:: max(1, len(shapes) // _ASKED)]


def _effective(
    field: str, values: Sequence[int], shapes: Sequence[Algorithm], accepts: Accepts
) -> Sequence[int]:
    if len(values) == 1:
        return values
    found = [
        value
        for value in values
        if any(accepts(replace(shape, **{field: value})) for shape in shapes)
    ]
    return found if found and len(found) < len(values) else values[:1]


def _variants(asked: Algorithm, choices: Choices) -> Iterator[Algorithm]:
    """Yield the configurations that differ in swizzle and split-k, without ``asked`` itself."""
    whole = [(1, NO_REDUCTION)]
    for swizzle, (split, reduction) in product(
        choices.swizzles, [*whole, *product(choices.splits, choices.reductions)]
    ):
        variant = replace(asked, swizzle=swizzle, split_k=split, reduction=reduction)
        if variant != asked:
            yield variant
