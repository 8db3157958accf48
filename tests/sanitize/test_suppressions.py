"""Suppressions: matching and syntax."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitize.sample_races import PREFETCH, TRAIN_STEP, exact_operation, kernel, side

from cudakit.errors import InputError, UsageError
from cudakit.sanitize.baseline import Suppression, parse_pattern, suppressions

KERNEL = side(kernel())
COPY = side(exact_operation())


@pytest.mark.parametrize(
    "pattern",
    [
        "kernel:*vectorized_elementwise*",  # the demangled name
        "kernel:at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, …>",  # the short name
        "kernel:_ZN2at6native29*",  # the mangled name
        "site:train.py",
        "site:/home/user/train/train.py",
        "site:train/*.py",
        "site:train.py:step",
        "site:*:st*",
        "site:torch/nn/modules/linear.py:forward",
    ],
)
def test_pattern_matches_kernel_or_frame_of_a_side(pattern: str) -> None:
    assert parse_pattern(pattern).covers(KERNEL)


@pytest.mark.parametrize(
    "pattern",
    ["kernel:add", "kernel:vectorized*", "site:rain.py", "site:train.py:ste", "site:other.py"],
)
def test_pattern_covers_only_matching_races(pattern: str) -> None:
    assert not parse_pattern(pattern).covers(KERNEL)


def test_pattern_needs_to_match_one_side_only() -> None:
    assert parse_pattern("kernel:*elementwise*").covers(COPY, KERNEL)
    assert not parse_pattern("kernel:*").covers(COPY)
    assert (PREFETCH, TRAIN_STEP) == (1, 2)


@pytest.mark.parametrize(
    "pattern", ["", "loader.py", "kernel:", "kernel", "site:", "site::f", "site:a.py:", "race:x"]
)
def test_invalid_pattern_is_refused_in_one_line(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        suppressions([pattern])

    assert caught.value.message == f"--suppress: {pattern!r} is not a suppression pattern"
    assert "kernel:GLOB" in caught.value.hint


def test_suppression_file_has_one_pattern_per_line_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text(
        "# ours\n\nkernel:nccl*  # by design\nsite:a.py:{lambda()#1}\n", encoding="utf-8"
    )

    assert suppressions(["site:b.py", f"@{file}"]) == (
        Suppression("site:b.py", "--suppress", file="b.py"),
        Suppression("kernel:nccl*", f"{file}:3", kernel="nccl*"),
        Suppression("site:a.py:{lambda()#1}", f"{file}:4", file="a.py", function="{lambda()#1}"),
    )


def test_error_names_the_invalid_line(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text("kernel:a\nnonsense\n", encoding="utf-8")

    with pytest.raises(UsageError, match=r"known\.txt:2: 'nonsense' is not a suppression"):
        suppressions([f"@{file}"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), (b"\xff\xfe", "is not a file of suppressions: it is not text")],
)
def test_error_names_the_unreadable_file(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "known.txt"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises((InputError, UsageError), match=f"{file}'? {reason}"):
        suppressions([f"@{file}"])


def test_endless_file_of_suppressions_is_rejected() -> None:
    with pytest.raises(InputError, match="/dev/zero is larger than 256 MiB"):
        suppressions(["@/dev/zero"])
