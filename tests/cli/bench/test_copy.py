from __future__ import annotations

import json

from invocation import Cli

from cudakit.cli.failure import ExitCode

SMALL = ("--sizes", "64KiB", "--warmup", "0")


def test_two_gpus_copy_to_each_other_without_being_asked(cli: Cli) -> None:
    run = cli("bench", "copy", "--gpu", "sim:h200x2", *SMALL, "--json")

    cases = json.loads(run.stdout)["results"]
    peers = [case["axes"] for case in cases if "peer" in case["axes"]]
    assert [(axes["direction"], axes["peer"], axes["access"]) for axes in peers] == [
        ("peer", 1, "direct"),
        ("peer-both", 1, "direct"),
    ]
    assert all(case["verified"] and case["limit"] for case in cases)


def test_one_gpu_has_no_peer_and_says_so_in_a_line(cli: Cli) -> None:
    run = cli("bench", "copy", "--gpu", "sim", "--directions", "peer", *SMALL)

    assert (run.exit_code, run.stdout) == (ExitCode.USAGE, "")
    assert "CUDA shows one GPU only" in run.stderr


def test_pageable_memory_is_timed_by_the_host_and_the_report_says_so(cli: Cli) -> None:
    run = cli("bench", "copy", "--gpu", "sim", "--directions", "h2d,pageable-h2d", *SMALL)

    assert run.exit_code == ExitCode.OK
    assert "pageable-h2d: clock of the host" in run.stdout
