from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from invocation import Cli
from memory.load import files
from memory.load.files import KIB, LARGE, MIB, SMALL, event, pickled
from rich.cells import cell_len

import cudakit
from cudakit.cli.failure import ExitCode

DATA = Path(__file__).parents[1] / "data"
OOM, TRAINING = DATA / "oom.pkl.gz", DATA / "train_python.pkl.gz"

Json = dict[str, Any]
Ask = Callable[..., Json]


@pytest.fixture
def ask(cli: Cli) -> Ask:
    """Return a function that runs memviz with --json and parses the output."""

    def run_and_parse(*arguments: str | Path) -> Json:
        run = cli("memviz", *arguments, "--json")
        assert (run.exit_code, run.stderr) == (0, "")
        document: Json = json.loads(run.stdout)
        return document

    return run_and_parse


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.pkl"
    path.write_bytes(pickled(files.snapshot()))
    return path


def raw(path: Path) -> Json:
    with gzip.open(path) as file:
        document: Json = pickle.load(file)  # noqa: S301 our own example
    return document


def usage_error(cli: Cli, *arguments: str | Path) -> str:
    run = cli("memviz", *arguments)
    assert (run.exit_code, run.stdout) == (2, "")
    error, hint = run.stderr.splitlines()
    assert error.startswith("cudakit: error: ")
    assert hint.startswith("hint: ")
    return error


# JSON fields.

INT, FLOAT, TEXT = int, (int, float), str
BYTES = (
    "allocated_bytes",
    "requested_bytes",
    "active_bytes",
    "reserved_bytes",
    "pending_free_bytes",
)


def check(document: Json, kinds: dict[str, Any]) -> None:
    for key, kind in kinds.items():
        assert isinstance(document[key], kind), (key, document[key])
        assert isinstance(document[key], bool) == (kind is bool), key


def check_stack(document: Json) -> None:
    assert isinstance(document["stack"], list)
    for frame in document["stack"]:
        check(frame, {"name": TEXT, "filename": TEXT, "line": INT})


@pytest.mark.parametrize("path", [OOM, TRAINING], ids=lambda path: path.name)
def test_json_has_the_documented_fields(ask: Ask, path: Path) -> None:
    document = ask(path)
    assert document["schema"] == "cudakit.memviz/1"
    for device in document["devices"]:
        check(device, {"device": INT, "events": INT, "exact": bool, "inconsistencies": INT})
        check(device["end"], dict.fromkeys((*BYTES, "segments", "blocks"), INT))
        check(
            device["peak"],
            dict.fromkeys(("event", "time_us", *BYTES[:2], "reserved_bytes"), INT)
            | {"allocated_is_derived": bool},
        )
        check(device, {"ooms": list, "holders": list, "leaks": list, "fragmentation": dict})
        for oom in device["ooms"]:
            check(oom, {"event": INT, "size_bytes": INT, "sentence": TEXT, "remedies": list})
            check_stack(oom)
        assert device["holders"]
        for holder in device["holders"]:
            check(holder, {"bytes": INT, "count": INT, "share": FLOAT})
            check_stack(holder)
        for leak in device["leaks"]:
            check(leak, {"bytes": INT, "bytes_per_step": INT, "growth": list})
            check_stack(leak)


def sums(segments: Iterable[Json]) -> Json:
    """Return the totals of the final state, as PyTorch's statistics define them."""
    segment_list = list(segments)
    blocks = [block for segment in segment_list for block in segment["blocks"]]
    active = [block for block in blocks if block["state"] != "inactive"]
    allocated = [block for block in active if block["state"] == "active_allocated"]
    return {
        "allocated_bytes": sum(block["size"] for block in allocated),
        "requested_bytes": sum(block["requested_size"] for block in active),
        "active_bytes": sum(block["size"] for block in active),
        "reserved_bytes": sum(segment["total_size"] for segment in segment_list),
        "pending_free_bytes": sum(b["size"] for b in active if b["state"] != "active_allocated"),
        "segments": len(segment_list),
        "blocks": len(active),
    }


@pytest.mark.parametrize("path", [OOM, TRAINING], ids=lambda path: path.name)
def test_final_state_equals_the_sums_of_the_file(ask: Ask, path: Path) -> None:
    (device,) = ask(path)["devices"]
    expected = sums(raw(path)["segments"])
    assert {key: device["end"][key] for key in expected} == expected
    assert expected["allocated_bytes"] == sum(s["allocated_size"] for s in raw(path)["segments"])
    assert device["events"] == len(raw(path)["device_traces"][0])
    assert device["exact"]


def test_each_device_has_its_own_final_state(ask: Ask, tmp_path: Path) -> None:
    segments = [*files.segments(), *(s | {"device": 2} for s in files.segments()[1:])]
    path = tmp_path / "two.pkl"
    path.write_bytes(pickled({"segments": segments, "device_traces": []}))
    end_by_device = {device["device"]: device["end"] for device in ask(path)["devices"]}
    assert end_by_device.keys() == {0, 2}
    for number, end in end_by_device.items():
        expected = sums(s for s in segments if s["device"] == number)
        assert {key: end[key] for key in expected} == expected


def test_pinned_host_memory_is_a_device_without_an_index(ask: Ask, tmp_path: Path) -> None:
    host = {"address": LARGE, "size": MIB, "allocated": 1, "active": 1}
    path = tmp_path / "host.pkl"
    path.write_bytes(pickled(files.snapshot(host_segments=[host])))
    gpu, pinned = ask(path)["devices"]
    assert (gpu["device"], pinned["device"]) == (0, None)
    assert pinned["end"]["allocated_bytes"] == MIB
    assert [d["device"] for d in ask(path, "--device", "host")["devices"]] == [None]


# The moment.


def test_consistent_snapshot_is_exact(ask: Ask, snapshot: Path) -> None:
    (device,) = ask(snapshot)["devices"]
    assert (device["exact"], device["inconsistencies"]) == (True, 0)
    assert device["peak"]["requested_bytes"] == 30 * MIB + 1000
    assert device["peak"]["event"] == 7


@pytest.mark.parametrize(
    ("at", "name", "number", "requested"),
    [
        ("peak", "peak", 7, 30 * MIB + 1000),
        ("end", "end", 11, 30 * MIB + 1000),
        ("oom", "oom", 11, 30 * MIB + 1000),
        ("2", "event", 2, 1512),
        ("0", "event", 0, 0),
    ],
)
def test_tables_show_the_chosen_moment(
    ask: Ask, snapshot: Path, at: str, name: str, number: int, requested: int
) -> None:
    (device,) = ask(snapshot, "--at", at)["devices"]
    assert (device["at"]["name"], device["at"]["event"]) == (name, number)
    assert device["at"]["state"]["requested_bytes"] == requested
    assert sum(holder["requested_bytes"] for holder in device["holders"]) == requested


def test_action_at_another_moment_names_the_call_site_at_the_peak(cli: Cli) -> None:
    action = "to lower the peak, start with the largest call site"
    assert f"{action}.\n" in cli("memviz", str(TRAINING), "-q").stdout
    assert (
        f"{action} at the peak (--at peak).\n"
        in cli("memviz", str(TRAINING), "--at", "5", "-q").stdout
    )


@pytest.mark.parametrize("at", ["yesterday", "12", "-2", "1.5", "", "99999999999999999999"])
def test_invalid_moment_is_a_usage_error(cli: Cli, snapshot: Path, at: str) -> None:
    usage_error(cli, snapshot, f"--at={at}")


def test_at_oom_without_a_failed_allocation_is_a_usage_error(cli: Cli) -> None:
    usage_error(cli, TRAINING, "--at", "oom")


@pytest.mark.parametrize("at", ["oom", "5"])
def test_moment_in_a_file_without_a_trace_is_refused_by_name(cli: Cli, at: str) -> None:
    run = cli("memviz", DATA / "fuzz" / "segments-only.pkl", "--at", at)

    assert run.exit_code == ExitCode.USAGE
    assert "segments-only.pkl: the file has no trace" in run.stderr


def test_files_that_the_selection_leaves_out_are_named(cli: Cli) -> None:
    host, training = DATA / "fuzz" / "host.pkl", TRAINING
    text = " ".join(cli("memviz", host, training, "--device", "host").stdout.split())
    assert f"Without the selected device: {training}." in text

    text = " ".join(cli("memviz", DATA / "oom.pkl.gz", training, "--at", "oom").stdout.split())
    assert f"No allocation failed in {training} cuda:0: in place of a failure, --at oom" in text


def test_approximate_size_of_a_chosen_event_is_explained(cli: Cli) -> None:
    explanation = "Sizes marked ~ were computed by the allocator's rules, not recorded."
    at_event, at_end = (
        " ".join(cli("memviz", OOM, "--at", at).stdout.split()) for at in ("3000", "end")
    )
    assert "~362 MiB" in at_event
    assert explanation in at_event
    assert "~" not in at_end


def test_replayed_changes_of_the_program_are_distinct_from_settings(cli: Cli) -> None:
    text = " ".join(cli("memviz", DATA / "fuzz" / "host.pkl").stdout.split())
    assert "program: all requests on one stream fails" in text
    assert 'Rows marked "program:" replay a change of the program' in text
    assert "garbage_collection_threshold:0.8 fails" in text


# Selections.


@pytest.mark.parametrize(
    ("option", "value", "reserved"),
    [
        ("--device", "0", 42 * MIB),
        ("--device", "cuda:0", 42 * MIB),
        ("--stream", "0", 2 * MIB),
        ("--stream", "1", 40 * MIB),
        ("--pool", "0,0", 2 * MIB),
        ("--pool", "default", 2 * MIB),
        ("--pool", "MemPool 0,1", 40 * MIB),
        ("--pool", "0,1", 40 * MIB),
    ],
)
def test_options_select_a_device_stream_or_pool(
    ask: Ask, snapshot: Path, option: str, value: str, reserved: int
) -> None:
    (device,) = ask(snapshot, option, value)["devices"]
    assert device["end"]["reserved_bytes"] == reserved


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--device", "7"),
        ("--device", "gpu"),
        ("--device", "host"),
        ("--stream", "9"),
        ("--stream", "-1"),
        ("--stream", "x"),
        ("--pool", "9,9"),
        ("--pool", "1"),
        ("--pool", "a,b"),
        ("--top", "-1"),
        ("--top", "many"),
    ],
)
def test_invalid_selection_is_a_usage_error(
    cli: Cli, snapshot: Path, option: str, value: str
) -> None:
    usage_error(cli, snapshot, option, value)


@pytest.mark.parametrize("option", ["--stream", "--top"])
def test_text_for_a_number_is_refused_as_no_integer(cli: Cli, snapshot: Path, option: str) -> None:
    run = cli("memviz", snapshot, option, "x")

    assert f"invalid value for '{option}': 'x' is not an integer\n" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--diff", TRAINING, "--summary"), "--diff has no summary; remove --summary"),
        (("--diff", TRAINING, "--at", "peak"), "--diff always compares the peak and the end"),
        (("--what-if", "", "--summary"), "--what-if has no summary; remove --summary"),
        (("--summary", "--top", "3"), "--summary shows no tables; remove --top"),
    ],
)
def test_option_without_effect_is_a_usage_error(
    cli: Cli, arguments: tuple[str | Path, ...], message: str
) -> None:
    run = cli("memviz", TRAINING, *arguments)

    assert run.exit_code == ExitCode.USAGE
    assert message in run.stderr


@pytest.mark.parametrize("option", [(), ("--summary",)])
def test_report_begins_with_the_selected_pool(
    cli: Cli, snapshot: Path, option: tuple[str, ...]
) -> None:
    report = cli("memviz", snapshot, "--pool", "default", *option).stdout

    assert "i Shown: pool default only; failed allocations are those of" in report
    assert "i Shown:" not in cli("memviz", snapshot, *option).stdout


def test_python_and_command_select_the_same_pool(cli: Cli, snapshot: Path) -> None:
    run = cli("memviz", snapshot, "--pool", "default", "--json")
    (device,) = cudakit.memviz(snapshot, pool="default", device="cuda:0", at="2").devices

    assert (
        device.end.reserved_bytes == json.loads(run.stdout)["devices"][0]["end"]["reserved_bytes"]
    )
    assert device.at.event == 2
    with pytest.raises(cudakit.UsageError, match="'foo' is not a moment"):
        cudakit.memviz(snapshot, at="foo")


def test_missing_file_argument_is_a_usage_error(cli: Cli) -> None:
    usage_error(cli)


# The report.


def test_report_has_the_cause_and_the_call_sites(cli: Cli) -> None:
    run = cli("memviz", OOM)
    assert (run.exit_code, run.stderr) == (0, "")
    assert "Allocating 96.0 MiB failed" in run.stdout
    for line in ("Memory by call site at the peak", "Fragmentation", "lab/snaps.py:14 forward"):
        assert line in run.stdout


@pytest.mark.parametrize("path", [OOM, TRAINING], ids=lambda path: path.name)
@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_line_is_wider_than_the_terminal(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, path: Path, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = cli("memviz", path, "--top", "0").stdout.splitlines()
    assert max(map(cell_len, lines)) <= width


def test_top_limits_every_table_and_zero_shows_all(cli: Cli) -> None:
    short, full = (cli("memviz", TRAINING, "--top", n).stdout for n in ("1", "0"))
    assert "--top 0 shows all" in short
    assert "--top 0 shows all" not in full
    assert len(short.splitlines()) < len(cli("memviz", TRAINING).stdout.splitlines())
    assert len(full.splitlines()) > len(cli("memviz", TRAINING).stdout.splitlines())


def test_file_without_a_trace_has_a_report_of_its_end(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "segments.pkl"
    path.write_bytes(pickled(files.segments()))
    run = cli("memviz", path)
    assert run.exit_code == 0
    assert "Without a trace, only the end is known" in run.stdout
    assert "at the peak" not in run.stdout
    assert "Growth was not checked: the snapshot has no trace." in run.stdout
    assert "20.0 MiB" in run.stdout


def test_empty_snapshot_has_a_report(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "nothing.pkl"
    path.write_bytes(pickled({"segments": [], "device_traces": [[]]}))
    assert cli("memviz", path).exit_code == 0


def test_several_files_share_one_report(cli: Cli, ask: Ask, tmp_path: Path) -> None:
    paths = [tmp_path / f"rank{rank}.pkl" for rank in range(3)]
    for rank, path in enumerate(paths):
        last = event("alloc", SMALL + MIB, (rank + 1) * KIB)
        path.write_bytes(pickled(files.snapshot(device_traces=[[last]])))
    document = ask(*paths)
    assert [file["name"] for file in document["files"]] == [str(path) for path in paths]
    assert [device["file"] for device in document["devices"]] == [str(path) for path in paths]
    text = cli("memviz", *paths).stdout
    assert "GPU memory of 3 files" in text
    assert all(path.name in text for path in paths)
