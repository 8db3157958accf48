"""Every way to configure an algorithm of cuBLASLt that the library accepts.

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

# cublasLtReductionScheme_t: how the parts that split-k makes of a sum are added up.
NO_REDUCTION, IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE = 0, 1, 2, 4
SCHEMES = (IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE)

# Into how many parts k is split: the library takes any number, and finely cut sums gain nothing more.
SPLITS = (2, 3, 4, 5, 6, 8, 10, 12, 16)

# So many at least of the tiles and stages that an algorithm accepts are asked whether a value goes with them.
_ASKED = 16

# Returns the algorithm with the workspace that it needs; None where the library refuses it.
Accepts = Callable[[Algorithm], "Algorithm | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What one algorithm can be configured with; the first of each is the usual one."""

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
    """Return the schemes by which settings let the parts of a sum be added up.

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
    """Yield what is accepted of all that can be chosen, each once, and None for what is refused.

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
    asked_of = _spread(alone or shapes)
    clusters = _mattering("cluster", choices.clusters, asked_of, accepts)
    inners = _mattering("inner", choices.inners, asked_of, accepts)
    for shape, custom, cluster, inner in product(shapes, choices.customs, clusters, inners):
        asked = replace(shape, custom=custom, cluster=cluster, inner=inner)
        accepted = accepts(asked)
        yield accepted if asked != shape else None
        if accepted:
            yield from map(accepts, _variants(asked, choices))


def in_turn(
    iterators: Iterable[Iterator[Algorithm | None]], is_over: Callable[[], bool] = never
) -> Iterator[Algorithm]:
    """Yield the first of each, then the second of each: whoever stops early has seen something of all.

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


def _spread(shapes: Sequence[Algorithm]) -> Sequence[Algorithm]:
    """Choose a few from first to last: to ask of all takes seconds an algorithm."""
    return shapes[:: max(1, len(shapes) // _ASKED)]


def _mattering(
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
    """Yield what differs in its swizzle and in how k is split, but not ``asked`` itself."""
    whole = [(1, NO_REDUCTION)]
    for swizzle, (split, reduction) in product(
        choices.swizzles, [*whole, *product(choices.splits, choices.reductions)]
    ):
        variant = replace(asked, swizzle=swizzle, split_k=split, reduction=reduction)
        if variant != asked:
            yield variant
