"""Reading the files that a user names, and the errors for files of another kind."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import pytest

from cudakit.errors import InputError
from cudakit.input_files import ExpectedFile, check_schema, read_json, read_text, wrong_file_error

LIST = ExpectedFile("a list of shapes", "write a list with: cudakit list PROGRAM")
SNAPSHOT = pickle.dumps({"segments": [{"device": 0}], "device_traces": []})


def test_byte_order_mark_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbf4 4 4\r\n")

    assert read_text(file, LIST) == "4 4 4\r\n"


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none does not exist"):
        read_text(tmp_path / "none", LIST)
    with pytest.raises(InputError, match="is a directory"):
        read_text(tmp_path, LIST)
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        read_text(tmp_path / ("x" * 5000), LIST)


def test_empty_file_is_an_error_unless_allowed(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    with pytest.raises(InputError, match="is empty") as caught:
        read_text(tmp_path / "empty", LIST)

    assert caught.value.hint == LIST.hint
    assert read_text(tmp_path / "empty", LIST, may_be_empty=True) == ""


def test_endless_file_is_too_large() -> None:
    with pytest.raises(InputError, match="/dev/zero is larger than 256 MiB"):
        read_text(Path("/dev/zero"), LIST)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\xff", "is not a list of shapes: it is not text"),
        (b"text", "is not a list of shapes: it is not JSON"),
        (b'{"a": ', r"is not valid JSON: it ends too early \(line 1, column 7\)"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
        (b"[" + b"9" * 5000 + b"]", "a number in its JSON is too long"),
    ],
)
def test_invalid_json_is_an_error_with_the_hint(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(InputError, match=message) as caught:
        read_json(tmp_path / "file", LIST)

    assert caught.value.hint == LIST.hint


@pytest.mark.parametrize(
    ("start", "kind", "hint"),
    [
        (b"cudakit log\n\x02\0\0\0", "a log of cudakit run", "cudakit sanitize a.file"),
        (SNAPSHOT, "a memory snapshot", "show it with: cudakit memviz a.file"),
        (
            gzip.compress(SNAPSHOT, mtime=0),
            "a memory snapshot",
            "show it with: cudakit memviz a.file",
        ),
        (b'{"segments": [', "a memory snapshot", "show it with: cudakit memviz a.file"),
        (b'{\n "schema": "cudakit.profile/1",', "a profile", "cudakit profile a.file"),
        (b'{"schema": "cudakit.bench/1",', "a result of cudakit bench", "bench compare a.file"),
        (b'{"schema": "cudakit.tuned/1",', "a result of cudakit bench gemm --tune", "--tuned"),
        (b'{"schema": "cudakit.sanitize.baseline/1"', "a baseline of races", "--baseline a.file"),
        (b'{"schema": "cudakit.sanitize/1"', "a saved report of races", LIST.hint),
        (b'{"schema": "cudakit.x/1"', "a JSON document with the schema cudakit.x", LIST.hint),
        (b'{"displayTimeUnit":"ns","traceEvents":[', "a timeline", "https://ui.perfetto.dev"),
        (b"PK\x03\x04", "a zip archive (as torch.save writes)", LIST.hint),
    ],
)
def test_known_kind_of_file_is_named_with_its_command(start: bytes, kind: str, hint: str) -> None:
    error = wrong_file_error("a.file", start, LIST)

    assert error.message == f"a.file is {kind}, not a list of shapes"
    assert hint in error.hint


@pytest.mark.parametrize(
    "start", [b"", b"\x1f\x8b", b"\x1f\x8bnot gzip at all", b"{}", b"\x80\x04"]
)
def test_unknown_kind_of_file_is_not_the_expected_kind(start: bytes) -> None:
    error = wrong_file_error("a.file", start, LIST, reason="it is odd")

    assert (error.message, error.hint) == (
        "a.file is not a list of shapes: it is odd",
        LIST.hint,
    )


def test_python_script_is_put_into_the_hint() -> None:
    error = wrong_file_error("train.py", b"import torch", LIST)

    assert error.message == "train.py is a Python script, not a list of shapes"
    assert error.hint == "write a list with: cudakit list train.py"


def test_file_of_the_expected_kind_is_never_another_kind() -> None:
    snapshot = ExpectedFile("a memory snapshot", "")

    assert (
        wrong_file_error("a", SNAPSHOT, snapshot, reason="it is odd").message
        == "a is not a memory snapshot: it is odd"
    )


def test_schema_of_another_version_names_both() -> None:
    document = {"schema": "cudakit.list/1"}
    assert check_schema("a", document, "cudakit.list/1", LIST) == document

    with pytest.raises(InputError, match=r"has the schema 'cudakit.list/1'.*'cudakit.list/2'"):
        check_schema("a", document, "cudakit.list/2", LIST)
