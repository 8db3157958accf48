from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pytest
from document_views import no_picture
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import UsageError
from cudakit.report.csv import render
from cudakit.report.document import Columns, Document, Note, Section, View
from cudakit.report.escape import escape_invisible


def text_of(arrays: dict[str, Any], **text: tuple[str, ...]) -> str:
    columns = Columns("events", {name: np.asarray(items) for name, items in arrays.items()}, text)
    return "".join(render(Document("Events", (columns,))))


def rows_of(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


def test_header_has_the_names_and_lines_end_in_cr_lf() -> None:
    assert (
        text_of({"size": [1, 2], "freed": [True, False]}) == "size,freed\r\n1,true\r\n2,false\r\n"
    )


def test_ids_are_written_as_their_text() -> None:
    text = text_of({"action": [1, 0, 1]}, action=("alloc", "free"))
    assert rows_of(text) == [["action"], ["free"], ["alloc"], ["free"]]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint64])
def test_id_without_text_is_an_empty_cell(kind: Any) -> None:
    ids: Any = np.array([0, 200, 255], dtype=np.uint8).astype(kind)
    assert rows_of(text_of({"n": [1, 2, 3], "pool": ids}, pool=("a",)))[1:] == [
        ["1", "a"],
        ["2", ""],
        ["3", ""],
    ]


def test_only_addresses_are_written_in_hex() -> None:
    words = np.array([0, 2**64 - 1], dtype=np.uint64)
    text = text_of({"address": words, "block_address": words, "addresses": words})
    assert rows_of(text)[2] == ["0xffffffffffffffff", "0xffffffffffffffff", str(2**64 - 1)]


@pytest.mark.parametrize("word", ["=1+1", "+1", "-1", "@SUM(A1)", "\uff1d1+1", "\uff20SUM(A1)"])
def test_text_like_a_formula_gets_an_apostrophe(word: str) -> None:
    assert rows_of(text_of({"name": [0]}, name=(word,)))[1] == ["'" + word]
    assert rows_of(text_of({"name": np.array([word], dtype=object)}))[1] == ["'" + word]


def test_negative_number_stays_a_number() -> None:
    assert rows_of(text_of({"change": [-5], "ratio": [-0.5]}))[1] == ["-5", "-0.5"]


def test_nan_is_an_empty_cell_and_a_lone_nan_is_a_row() -> None:
    assert rows_of(text_of({"seconds": [np.nan, 1.5]})) == [["seconds"], [""], ["1.5"]]


def test_invisible_characters_are_escaped() -> None:
    word = "a\ud800\x1b]8;;x\x07\x9b\u202e\r\n"
    escaped = r"a\ud800\x1b]8;;x\x07\x9b\u202e\r\n"
    assert text_of({"name": [0]}, name=(word,)) == f'name\r\n"{escaped}"\r\n'


def test_semicolon_is_quoted_for_locales_that_separate_by_it() -> None:
    assert text_of({"name": [0]}, name=("a;=1",)) == 'name\r\n"a;=1"\r\n'


def test_columns_are_found_in_sections_and_views() -> None:
    columns = Columns("found", {"n": np.arange(1)})
    view = View("picture", ("found",), no_picture, fallback=columns)
    document = Document("Nested", (Note("info", "first"), Section("a", (view,))))
    assert "".join(render(document)) == "n\r\n0\r\n"


def test_only_the_first_columns_are_written() -> None:
    nodes = tuple(Columns(name, {name: np.arange(1)}) for name in ("first", "second"))
    assert "".join(render(Document("Two", nodes))) == "first\r\n0\r\n"


def test_columns_without_rows_are_a_header() -> None:
    assert text_of({"size": np.zeros(0), "name": np.zeros(0, dtype=np.int32)}) == "size,name\r\n"


def test_document_without_columns_is_rejected_before_anything_is_written() -> None:
    with pytest.raises(UsageError, match="'Empty' has no rows"):
        render(Document("Empty", ()))


def test_arrays_of_different_lengths_are_rejected() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        text_of({"a": [1], "b": [1, 2]})


def test_many_rows_are_written_in_chunks() -> None:
    columns = Columns("many", {"a": np.arange(10_000), "b": np.arange(10_000)})
    chunks = list(render(Document("Many", (columns,))))
    assert len(rows_of("".join(chunks))) == 10_001
    assert max(map(len, chunks)) < 64 * 1024


_words = st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4)


@given(
    st.integers(0, 3000),
    _words,
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.just(0), min_size=1, max_size=4),
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=4),
)
def test_csv_module_reads_back_what_was_written(
    rows: int, words: list[str], integers: list[int], floats: list[float]
) -> None:
    arrays = {
        "id": np.arange(rows) % len(words),
        "integer": np.resize(np.array(integers, dtype=np.int64), rows),
        "float": np.resize(np.array(floats), rows),
    }
    header, *body = rows_of(text_of(arrays, id=tuple(words)))
    assert header == list(arrays)
    assert [word.removeprefix("'") for word, *_ in body] == [
        escape_invisible(words[item]).removeprefix("'") for item in arrays["id"]
    ]
    assert [int(row[1]) for row in body] == arrays["integer"].tolist()
    assert [float(row[2]) for row in body] == arrays["float"].tolist()


@given(_words)
def test_no_cell_begins_like_a_formula(words: list[str]) -> None:
    body = rows_of(text_of({"id": np.arange(len(words))}, id=tuple(words)))[1:]
    assert len(body) == len(words)
    assert not any(word.startswith(("=", "+", "-", "@", "\t", "\r")) for (word,) in body)
