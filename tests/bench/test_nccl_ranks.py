""""""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.nccl_ranks import PERIOD, Pattern, exact_limit, expected_chunks, input_chunks
from cudakit.errors import Unsupported
from cudakit.gpu.api.arrays import ELEMENTS, Element, decode
from cudakit.gpu.api.collectives import OPERATIONS, Collective

collectives = st.builds(
    Collective,
    st.sampled_from(OPERATIONS),
    st.sampled_from(list(ELEMENTS.values())),
    st.integers(1, 3 * PERIOD),
)


def values(chunks: list[Pattern], count: int, element: Element) -> npt.NDArray[np.float64]:
    return np.concatenate([decode(chunk.elements(count), element) for chunk in chunks])


@given(collectives, st.integers(1, 8), st.integers(0, 2**64 - 1))
def test_expected_outputs_follow_the_definition_of_the_operation(
    collective: Collective, ranks: int, seed: int
) -> None:
    count, element = collective.count, collective.element
    inputs = [
        values(input_chunks(collective, rank, ranks, seed), count, element) for rank in range(ranks)
    ]
    for rank in range(ranks):
        chunk = slice(rank * count, (rank + 1) * count)
        expected = {
            "all-reduce": lambda: sum(inputs),
            "all-gather": lambda: np.concatenate(inputs),
            "reduce-scatter": lambda: sum(inputs)[chunk],  # noqa: B023 called at once
            "broadcast": lambda: inputs[0],
            "reduce": lambda: sum(inputs) if rank == 0 else [],  # noqa: B023
            "all-to-all": lambda: np.concatenate([data[chunk] for data in inputs]),  # noqa: B023
            "send-receive": lambda: inputs[rank - 1],  # noqa: B023
        }[collective.operation]()
        chunks = expected_chunks(collective, rank, ranks, seed)
        output = values(chunks, count, element) if chunks else []
        np.testing.assert_array_equal(output, expected)


@given(collectives, st.integers(2, 8), st.integers(0, 100))
def test_ranks_have_different_inputs(collective: Collective, ranks: int, seed: int) -> None:
    if collective.count < 32:
        return
    chunks = [input_chunks(collective, rank, ranks, seed)[0] for rank in range(ranks)]
    patterns = {chunk.elements(collective.count).tobytes() for chunk in chunks}

    assert len(patterns) == ranks


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("fp64", 2**53),
        ("fp32", 2**24),
        ("fp16", 2**11),
        ("bf16", 2**8),
        ("fp8_e4m3", 2**4),
        ("fp8_e5m2", 2**3),
        ("int8", 127),
        ("int32", 2**31 - 1),
    ],
)
def test_limit_of_exact_integers(name: str, limit: int) -> None:
    assert exact_limit(ELEMENTS[name]) == limit


def test_sum_over_too_many_ranks_for_its_type_is_unsupported() -> None:
    collective = Collective("all-reduce", ELEMENTS["fp8_e5m2"], 64)

    input_chunks(collective, 0, 8, 0)
    with pytest.raises(Unsupported, match="fp8_e5m2 over 9 ranks"):
        input_chunks(collective, 0, 9, 0)
