"""What kernels must touch is what a GPU recorded of them: to the byte, by the logs of the corpus."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import race_logs
from judge_races import CORPUS

from cudakit.trace.kinds import Kind, Known, Mode
from cudakit.trace.layout import view

READ, WRITE = Mode.READ, Mode.WRITE

# How they are accessed, how many bytes each has, how far it is to the next one, and how many there are.
Pieces = tuple[Mode, int, int, int]


def whole(mode: Mode, size: int) -> Pieces:
    return (mode, size, 0, 1)


MUST_TOUCH: dict[tuple[str, str], set[Pieces]] = {
    ("cupy_chain_clean", "cupy_fill"): {whole(WRITE, 40000)},
    ("cupy_in_place_clean", "cupy_add"): {whole(READ, 40000), whole(WRITE, 40000)},
    ("cupy_vector_tail_clean", "fill_by_four"): {whole(WRITE, 1001 * 4)},
    ("cupy_gather_clean", "gather"): {
        whole(READ, 256 * 4),
        (READ, 4, 3 * 4, 256),
        whole(WRITE, 256 * 4),
    },
    ("cupy_columns_clean", "fill_column"): {(WRITE, 4, 8 * 4, 256)},
    ("cupy_bytes_clean", "fill_every_other"): {(WRITE, 1, 2, 256)},
    ("triton_mask_clean", "fill"): {whole(WRITE, 1000 * 4)},
    ("triton_descriptor_clean", "double"): {
        (READ, 32 * 4, 128 * 4, 256),
        whole(WRITE, 256 * 32 * 4),
    },
    # One matrix as a whole, of the other the left half of each row, and what is stored by a tensor map.
    ("torch_matmul_clean", "nvjet"): {
        whole(READ, 4096 * 4096 * 2),
        (READ, 4096 * 2, 8192 * 2, 4096),
        whole(WRITE, 4096 * 4096 * 2),
    },
}


def did(log: str) -> Iterator[tuple[str, set[Pieces]]]:
    """Yield the name of each launch in a log, and what it did to data: counters of its own are left out."""
    for chain in race_logs.load(CORPUS / "logs" / f"{log}.npz"):
        accesses = chain.records[chain.records["kind"] == Kind.ACCESS]
        rows = view(accesses, Kind.ACCESS)
        ours = np.isin(rows["mode"], [READ, WRITE]) & np.isin(
            rows["known"], [Known.EXACT, Known.SUMMARY]
        )
        began = chain.records[chain.records["kind"] == Kind.LAUNCH]
        for launch, name in zip(began["seq"], view(began, Kind.LAUNCH)["name"], strict=True):
            mine = rows[ours & (accesses["seq"] == launch)]
            yield chain.strings[name], {pieces(row) for row in mine}


def pieces(row: np.void) -> Pieces:
    stride, count = int(row["stride_bytes"]), max(int(row["count"]), 1)
    size = int(row["hi"] - row["lo"]) - (count - 1) * stride
    return (Mode(int(row["mode"])), size, stride, count)


@pytest.mark.parametrize(("log", "kernel"), MUST_TOUCH)
def test_a_kernel_did_what_its_source_says(log: str, kernel: str) -> None:
    found = [touched for name, touched in did(log) if kernel in name]

    assert found
    assert all(touched == MUST_TOUCH[log, kernel] for touched in found)
