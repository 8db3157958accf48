from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from invocation import Cli
from memory.load import files
from memory.load.files import pickled

import cudakit
from cudakit.torch_rules.settings import KEYS

DATA = Path(__file__).parents[1] / "data"
OOM, TRAINING = DATA / "oom.pkl.gz", DATA / "train_python.pkl.gz"
GROWS = "expandable_segments:True"


def test_memviz_what_if_prints_the_headline_and_exits_with_0(cli: Cli) -> None:
    run = cli("memviz", OOM, "--what-if", GROWS)

    assert (run.exit_code, run.stderr) == (0, "")
    assert "✓ expandable_segments:True would have let the failed request succeed" in run.stdout


def test_memviz_what_if_json_has_a_schema_and_a_row_per_setting(cli: Cli) -> None:
    run = cli("memviz", OOM, "--what-if", GROWS, "--what-if", "", "--json")
    document = json.loads(run.stdout)

    assert document["schema"] == "cudakit.memviz.whatif/1"
    (device,) = document["devices"]
    assert [row["name"] for row in device["tried"]] == [GROWS, "defaults"]
    assert device["differences"] == []
    assert device["recorded"]["peak"]["reserved_bytes"] == 2988441600
    assert device["replayed"]["peak"] == device["recorded"]["peak"]
    assert device["best"] == 0


def test_memviz_what_if_returns_the_result_of_the_command(cli: Cli) -> None:
    result = cudakit.memviz_what_if(TRAINING, GROWS, limit_bytes=780 << 20)
    run = cli("memviz", TRAINING, "--what-if", GROWS, "--what-if-limit", "780MiB", "--json")

    assert result.devices[0].headline == json.loads(run.stdout)["devices"][0]["headline"]


def test_memviz_what_if_report_can_be_a_page(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "what-if.html"
    run = cli("memviz", OOM, "--what-if", GROWS, "-o", page)

    assert run.exit_code == 0
    assert "would have let the failed request succeed" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("snapshot", [OOM, "tests/data/fragmented_oom.pkl.gz"])
def test_limit_that_the_report_recommends_is_enough_in_a_replay(cli: Cli, snapshot: str) -> None:
    report = cli("memviz", snapshot).stdout
    (limit,) = re.findall(r"a limit of (\S+ GiB) +succeeds", report)
    assert f"a limit of {limit} is needed, as replays with several limits show" in " ".join(
        report.split()
    )

    run = cli("memviz", snapshot, "--what-if", "", "--what-if-limit", limit.replace(" ", ""))

    text = " ".join(run.stdout.split())
    assert "no request fails with the recorded settings" in text
    assert "with the limit of the recording in place of --what-if-limit, reproduces every" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--what-if", "expandable_segments:Yes"),
            "settings 'expandable_segments:Yes', character 21",
        ),
        (("--what-if", "max_split_size_mb:1"), "max_split_size_mb is 1 MiB"),
        (("--what-if", "", "--diff", OOM), "--what-if and --diff cannot be combined"),
        (("--what-if", "", "--fail-on", "growth:5%"), "--fail-on growth needs --diff"),
        (("--what-if", "", "--at", "end"), "--what-if replays the whole trace; remove --at"),
        (("--what-if", "", "--top", "3"), "--what-if shows all rows of its tables; remove --top"),
        (("--what-if", "", "-o", "all.csv"), "cannot write all.csv: this report has no format"),
        (("--what-if", "", "--what-if-limit", "lots"), "lots"),
        (("--what-if-limit", "1GiB"), "needs --what-if"),
        (("--what-if", "", "--what-if-limit", "0"), "--what-if-limit must be at least 1 byte"),
        (("--what-if", "backend:cudaMallocAsync"), "hint: remove this setting\n"),
        (("--what-if", "nope"), "hint: write settings as NAME:VALUE, separated by commas"),
        (("--what-if",), "hint: see cudakit memviz --help"),
        (("--what-if", "per_process_memory_fraction:0.5"), "does not record the size"),
        (("--what-if", "", "--device", "1"), "no device 1"),
        (("--what-if", "", "--device", "host"), "pinned host memory cannot be replayed"),
    ],
)
def test_invalid_what_if_options_are_a_usage_error(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    run = cli("memviz", OOM, *arguments)

    assert (run.exit_code, run.stdout) == (2, "")
    assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_unknown_setting_is_answered_with_the_complete_list_of_settings(cli: Cli) -> None:
    run = cli("memviz", OOM, "--what-if", "frobnicate:1")

    _, hint = run.stderr.splitlines()
    assert hint == f"hint: settings: {', '.join(KEYS)}"


def test_memviz_what_if_without_a_trace_is_rejected_with_a_hint(cli: Cli, tmp_path: Path) -> None:
    snapshot = files.snapshot()
    snapshot["device_traces"] = [[] for _ in snapshot["device_traces"]]
    path = tmp_path / "state.pkl"
    path.write_bytes(pickled(snapshot))
    run = cli("memviz", path, "--what-if", "")

    assert run.exit_code == 2
    assert "the file has no trace to replay" in run.stderr
    assert "hint: record one: cudakit run --memory" in run.stderr
