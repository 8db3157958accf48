"""Known races of libraries, recognized by the kernels and call stacks of both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sanitize.sample_races import found_race

from cudakit.sanitize.findings import message
from cudakit.sanitize.owners import known_issue
from cudakit.sanitize.races import Side
from cudakit.sanitize.report.races import race_note
from cudakit.stacks import Frame

SITE_PACKAGES = "/opt/venv/lib/python3.12/site-packages"
RACE = found_race()
FILL = "void at::native::vectorized_elementwise_kernel<2, at::native::FillFunctor<long> >"
SCRIPT = Frame("main", "/home/user/train.py", 7)


def side_in(file: str, function: str, *, kernel: str | None = None) -> Side:
    stack = (Frame(function, f"{SITE_PACKAGES}/{file}", 100), SCRIPT)
    return replace(RACE.current, stack=stack, site=1, kernel=kernel)


FFT = side_in("cupy/fft/_fft.py", "_exec_fft", kernel="void regular_fft_factor<512u>")
FFT_COPY = side_in("cupy/fft/_fft.py", "_exec_fft")
CAPTURE = side_in("torch/cuda/graphs.py", "CUDAGraph.capture_begin", kernel=FILL)
REPLAY = side_in("torch/cuda/graphs.py", "CUDAGraph.replay", kernel=FILL)


@pytest.mark.parametrize("sides", [(FFT, FFT), (FFT, FFT_COPY), (FFT_COPY, FFT)])
def test_ffts_of_cupy_that_share_a_plan_are_a_known_issue(sides: tuple[Side, Side]) -> None:
    issue = known_issue(*sides)

    assert issue
    assert issue.reference.endswith("cupy/issues/8079")


@pytest.mark.parametrize("sides", [(CAPTURE, REPLAY), (REPLAY, CAPTURE)])
def test_seed_of_a_replayed_graph_is_a_known_issue(sides: tuple[Side, Side]) -> None:
    issue = known_issue(*sides)

    assert issue
    assert "replay" in issue.reference


@pytest.mark.parametrize(
    "sides",
    [
        (FFT, RACE.previous),
        (RACE.current, FFT),
        (CAPTURE, CAPTURE),
        (REPLAY, replace(CAPTURE, kernel="void at::native::add")),
        (side_in("cupy/fft/_fft.py", "fft"), FFT),
        (side_in("mine/fft/_fft.py", "_exec_fft"), FFT),
    ],
)
def test_race_with_work_of_the_program_is_no_known_issue(sides: tuple[Side, Side]) -> None:
    assert known_issue(*sides) is None


def test_report_names_the_issue_and_its_advice_instead_of_a_wait() -> None:
    race = replace(RACE, current=FFT, previous=FFT, known_issue=known_issue(FFT, FFT))

    assert "set_size(0)" in race_note(race).remedies[0]
    assert "8079" in message([race])
    assert "record an event" not in message([race])
