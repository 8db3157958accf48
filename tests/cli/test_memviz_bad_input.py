"""Every bad file gives one line of error: no code runs, no memory grows, no traceback."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from invocation import Cli, CliRun
from memory.load import files, hostile
from memory.load.files import pickled

Refused = Callable[[bytes], str]


@pytest.fixture
def refused(cli: Cli, tmp_path: Path) -> Refused:
    """Run memviz on a file, and return the error line."""

    def reason(content: bytes) -> str:
        path = tmp_path / "snapshot.pkl"
        path.write_bytes(content)
        return refusal(cli("memviz", path), str(path))

    return reason


def refusal(run: CliRun, name: str) -> str:
    error, hint = run.stderr.splitlines()
    assert (run.exit_code, run.stdout) == (2, "")
    assert error.startswith(f"cudakit: error: {name}")
    assert hint.startswith("hint: ")
    assert error.isprintable()
    return error


# Files that are not snapshots.


def test_missing_file_is_named(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "nowhere.pkl"
    assert "does not exist" in refusal(cli("memviz", path), str(path))


def test_directory_is_rejected_by_name(cli: Cli, tmp_path: Path) -> None:
    assert "is a directory" in refusal(cli("memviz", tmp_path), str(tmp_path))


def test_error_names_the_bad_one_of_several_files(cli: Cli, tmp_path: Path) -> None:
    good_path, bad_path = tmp_path / "good.pkl", tmp_path / "bad.pkl"
    good_path.write_bytes(pickled(files.snapshot()))
    bad_path.write_bytes(b"")
    assert "is empty" in refusal(cli("memviz", good_path, bad_path), str(bad_path))


def test_control_characters_in_a_file_name_are_escaped(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\nb\u202e.pkl"
    refusal(cli("memviz", path), str(tmp_path))


PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(13)


class Own:
    """A class of a program."""


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"hello world\n", "it is neither a pickle nor JSON; its first bytes are 'hello wo'"),
        (b"cudakit log\n" + bytes(50), "is a log of cudakit run, not a memory snapshot"),
        (b"  \n\n", "it is neither a pickle nor JSON"),
        (PNG, "it is neither a pickle nor JSON; its first bytes are '\\x89PNG"),
        (b"\x7fELF\x02\x01\x01" + bytes(50), "it is neither a pickle nor JSON"),
        (bytes(100), "it is neither a pickle nor JSON"),
        (b"PK\x03\x04" + bytes(50), "zip archive (as torch.save"),
        (b"\x1f\x8b" + bytes(50), "cannot be decompressed: the file is damaged or truncated"),
        (
            b"\x28\xb5\x2f\xfd" + bytes(50),
            "cannot be decompressed: the file is damaged or truncated",
        ),
        (pickled([1, 2, 3]), "it is a list, but not of memory segments"),
        (pickled({"weights": [1.0], "step": 5}), "its dictionary has other keys (step, weights)"),
        (pickled("text"), "has text where"),
        (pickled(None), "has None where"),
        (pickled(np.zeros(3)), "names or calls a class or function"),
        (pickled({"a": np.float32(1)}), "names or calls a class or function"),
        (pickled(Own()), "names or calls a class or function"),
        (pickled({1, 2}), "makes an object that no memory snapshot holds"),
        (b"\x80\x09.", "protocol above 5"),
        (b"{", "invalid JSON"),
        (b'{"segments": [}', "invalid JSON"),
        (b"[1, 2]", "it is a list, but not of memory segments"),
        (b"[]", "it is a list, but not of memory segments"),
        (b'{"segments": NaN}', "has a number where"),
        (b'{"segments": [{"total_size": Infinity, "address": 1}]}', "no total_size"),
        (b'{"segments": [{"total_size": 1, "address": 1' + b"0" * 400 + b"}]}", "no address"),
        (b"[" + b"9" * 5000 + b"]", "a number has thousands of digits"),
        (b'{"segments": "\xff"}', "not UTF-8"),
        (b'{"segments": []' * 3, "invalid JSON"),
    ],
)
def test_file_that_is_not_a_snapshot_is_rejected_in_one_line(
    refused: Refused, content: bytes, why: str
) -> None:
    assert why in refused(content)


@pytest.mark.parametrize(
    "form", ["protocol-0.pkl", "protocol-2.pkl", "protocol-4.pkl", "plain.json"]
)
def test_truncated_file_is_rejected_at_every_length(refused: Refused, form: str) -> None:
    content = files.FORMS[form](files.snapshot())
    for length in {*range(1, 40), *range(40, len(content), 97), len(content) - 2, len(content) - 1}:
        refused(content[:length])


@pytest.mark.parametrize("form", ["gzip.pkl.gz", "zstandard.json.zst"])
def test_truncated_compressed_file_is_rejected_at_every_length(refused: Refused, form: str) -> None:
    content = files.FORMS[form](files.snapshot())
    for length in range(5, len(content) - 1, 41):
        refused(content[:length])


def test_error_is_a_json_object_with_json(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pkl"
    path.write_bytes(b"hello")
    run = cli("memviz", path, "--json")
    error = json.loads(run.stdout)["error"]
    assert run.exit_code == error["exit_code"] == 2
    assert error["kind"] == "SnapshotError"
    assert error["message"].startswith(str(path))
    assert error["hint"]
    assert run.stderr == ""


@pytest.mark.parametrize(
    "suffix", ["txt", "json", "html", "md", "csv", "perfetto.json", "collapsed", "speedscope.json"]
)
def test_bad_file_creates_no_output(cli: Cli, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "snapshot.pkl"
    path.write_bytes(b"hello")
    refusal(cli("memviz", path, "-o", tmp_path / f"output.{suffix}"), str(path))
    assert list(tmp_path.iterdir()) == [path]


# Files that would run code.


def test_pickle_never_calls_the_functions_it_names(cli: Cli, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name, content in hostile.callers(canary):
        path = tmp_path / "snapshot.pkl"
        path.write_bytes(content)
        error = refusal(cli("memviz", path), str(path))
        assert "names or calls a class or function" in error, name
        assert not canary.exists(), name
    # pickle.load does run the code of one of them.
    pickle.loads(dict(hostile.callers(canary))["GLOBAL"])  # noqa: S301 ours
    assert canary.exists()


@pytest.mark.parametrize("opcode", hostile.OPCODES)
def test_every_opcode_for_objects_is_rejected_by_name(refused: Refused, opcode: str) -> None:
    assert f"opcode {opcode} " in refused(hostile.OPCODES[opcode])


def test_bytes_after_the_pickle_are_ignored(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pkl"
    path.write_bytes(pickled(files.snapshot()) + hostile.OPCODES["REDUCE"])
    assert cli("memviz", path).exit_code == 0


# Files that would fill memory or take very long.

MEASURE = """
import resource, sys, time
from cudakit.cli import main
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
for path in sys.argv[1:]:
    before = time.process_time()
    code = main(["memviz", path, "-o", "/dev/null"])
    seconds = time.process_time() - before
    with open("/proc/self/status") as status:
        peak = next(line for line in status if line.startswith("VmHWM")).split()[1]
    print(code, seconds, peak, path, sep="\\t", flush=True)
"""


def test_hostile_files_take_little_memory_and_time(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("the memory of a process cannot be read here")
    paths = []
    for i, (name, content) in enumerate(hostile.heavy()):
        paths.append(tmp_path / f"{i} {name}")
        paths[-1].write_bytes(content)
    run = subprocess.run(
        [sys.executable, "-P", "-c", MEASURE, *paths], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in run.stderr
    assert run.returncode == 0
    rows = [line.split("\t") for line in run.stdout.splitlines()]
    assert len(rows) == len(paths)
    for code, seconds, peak_kib, path in rows:
        assert code == "2" or "many stacks" in path, path
        assert float(seconds) < 5, path
        assert int(peak_kib) < 200 << 10, path


@pytest.mark.parametrize(
    "content",
    [b"", pickled({"segments": [Own()]}), b"\x80\x04" + b"]" * 100_000 + b".", PNG],
    ids=["empty", "a class", "nested", "a picture"],
)
def test_bad_file_ends_the_process_with_2_and_one_line(
    command: list[str], tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "snapshot.pkl"
    path.write_bytes(content)
    run = subprocess.run([*command, "memviz", path], capture_output=True, text=True, check=False)
    refusal(CliRun(run.returncode, run.stdout, run.stderr), str(path))
