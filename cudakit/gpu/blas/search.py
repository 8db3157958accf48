"""Enumeration of all configurations of an algorithm that cuBLASLt supports.

The capabilities of an algorithm (cuBLAS Library, "cublasLtMatmulAlgoCapAttributes_t") list the values of each
parameter, but neither the valid combinations nor the supported cluster and inner shapes. The search checks
these with cublasLtMatmulAlgoCheck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cudakit.gpu.api.elements import BF16, FP16
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, never_over

# Values of cublasLtReductionScheme_t: how the partial sums of split-k are added.
NO_REDUCTION, IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE = 0, 1, 2, 4
SCHEMES = (IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE)

# Split-k factors to try. The library accepts any factor, but larger ones are not faster.
SPLIT_K_FACTORS = (2, 3, 4, 5, 6, 8, 10, 12, 16)

# Approximate number of tile and stage combinations with which each cluster and inner shape is tried.
_SAMPLE_COUNT = 16

# A function that returns an algorithm with its workspace size, or None if the library does not support it.
CheckAlgorithm = Callable[[Algorithm], "Algorithm | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values of each parameter of an algorithm; the default value is first."""

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
    """Return the reduction schemes that the settings allow.

    Deterministic mode excludes the in-place scheme: partial sums are added to D in an order that NVIDIA does
    not document as fixed. Disabled reduced precision excludes schemes that store partial sums of a 16-bit D
    in 16 bits, as in torch (aten/src/ATen/cuda/CUDABlas.cpp).
    """
    excluded_schemes = {IN_PLACE} if settings.deterministic else set()
    if not settings.reduced_precision and gemm.d.element in (FP16, BF16):
        excluded_schemes |= {IN_PLACE, IN_OUTPUT_TYPE}
    return tuple(scheme for scheme in SCHEMES if scheme not in excluded_schemes)


def configurations(choices: Choices, check_algorithm: CheckAlgorithm) -> Iterator[Algorithm | None]:
    """Yield each supported configuration once, and None for each unsupported one.

    Combinations of tiles and stages come first, because they are found fast, and their speed differs most. A
    cluster or inner shape is tried only if a sample of tiles and stages supports it; if every value is
    supported, the parameter has no effect and is skipped. Swizzle and split-k are tried on configurations
    that are supported without them.
    """
    shapes = [
        Algorithm(id=choices.id, tile=tile, stages=stages)
        for tile, stages in product(choices.tiles, choices.stages)
    ]
    supported_shapes: list[Algorithm] = []
    for shape in shapes:
        if accepted_shape := check_algorithm(shape):
            supported_shapes.append(shape)
        yield accepted_shape
    sampled_shapes = _sample(supported_shapes or shapes)
    clusters = _effective_values("cluster", choices.clusters, sampled_shapes, check_algorithm)
    inners = _effective_values("inner", choices.inners, sampled_shapes, check_algorithm)
    for shape, custom, cluster, inner_shape in product(shapes, choices.customs, clusters, inners):
        candidate = replace(shape, custom=custom, cluster=cluster, inner=inner_shape)
        accepted_shape = check_algorithm(candidate)
        yield accepted_shape if candidate != shape else None
        if accepted_shape:
            yield from map(check_algorithm, _variants(candidate, choices))


def round_robin(
    iterators: Iterable[Iterator[Algorithm | None]], is_over: Callable[[], bool] = never_over
) -> Iterator[Algorithm]:
    """Yield an algorithm of each iterator in turn, so that a search that stops early covers all of them.

    If an iterator yields None, the next iterator follows.
    """
    active_iterators = list(iterators)
    while active_iterators:
        for iterator in [*active_iterators]:
            if is_over():
                return
            try:
                algorithm = next(iterator)
            except StopIteration:
                active_iterators.remove(iterator)
            else:
                if algorithm:
                    yield algorithm


def _sample(shapes: Sequence[Algorithm]) -> Sequence[Algorithm]:
    """Return an evenly spaced sample of shapes, because trying all takes seconds per algorithm."""
    return shapes[:: max(1, len(shapes) // _SAMPLE_COUNT)]


def _effective_values(
    field: str, values: Sequence[int], shapes: Sequence[Algorithm], check_algorithm: CheckAlgorithm
) -> Sequence[int]:
    """Return the supported values of a parameter; only the first value if the parameter has no effect."""
    if len(values) == 1:
        return values
    supported_values = [
        value
        for value in values
        if any(check_algorithm(replace(shape, **{field: value})) for shape in shapes)
    ]
    return (
        supported_values if supported_values and len(supported_values) < len(values) else values[:1]
    )


def _variants(candidate: Algorithm, choices: Choices) -> Iterator[Algorithm]:
    """Yield the configurations that differ from ``candidate`` only in swizzle and split-k."""
    unsplit_variant = [(1, NO_REDUCTION)]
    for swizzle, (split, reduction) in product(
        choices.swizzles, [*unsplit_variant, *product(choices.splits, choices.reductions)]
    ):
        variant = replace(candidate, swizzle=swizzle, split_k=split, reduction=reduction)
        if variant != candidate:
            yield variant
