"""Moments, devices, streams and pools, as text and as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cudakit.errors import UsageError
from cudakit.memory.record.pools import POOL_IDS
from cudakit.memory.selection import parse_device, parse_moment, parse_pool, parse_stream
from cudakit.memory.snapshot import HOST


@pytest.mark.parametrize(("moment", "expected"), [("peak", "peak"), ("7", 7), (7, 7)])
def test_moment_is_a_name_or_an_index(moment: str | int, expected: str | int) -> None:
    assert parse_moment(moment) == expected


@pytest.mark.parametrize(
    ("device", "expected"), [("0", 0), ("cuda:1", 1), (2, 2), ("host", HOST), (HOST, HOST)]
)
def test_device_is_a_number_or_a_name(device: str | int, expected: int) -> None:
    assert parse_device(device) == expected


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("default", (0, 0)),
        ("0,0", (0, 0)),
        ("1,0", (1, 0)),
        ("graph 1,0", (1, 0)),
        ("MemPool 0,2", (0, 2)),
        ("cupy", POOL_IDS["cupy"]),
        ((1, 0), (1, 0)),
        ([0, 1], (0, 1)),
    ],
)
def test_pool_is_a_name_of_the_report_or_two_numbers(pool: Any, expected: tuple[int, int]) -> None:
    assert parse_pool(pool) == expected


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (parse_moment, "foo", "'foo' is not a moment"),
        (parse_moment, 1.5, "1.5 is not a moment"),
        (parse_device, "gpu", "'gpu' is not a device"),
        (parse_device, "cuda:x", "'cuda:x' is not a device"),
        (parse_stream, "main", "'main' is not a stream"),
        (parse_stream, None, "None is not a stream"),
        (parse_pool, "1", "'1' is not a pool"),
        (parse_pool, (1, 2, 3), "(1, 2, 3) is not a pool"),
        (parse_pool, 5, "5 is not a pool"),
    ],
)
def test_other_value_is_a_usage_error_that_names_it(
    parse: Callable[[Any], object], value: object, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        parse(value)

    assert refused.value.message == message
    assert refused.value.hint.startswith("use ")
