"""The files of ``cudakit bench``, whose names say what each holds, and the report beside them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from cudakit.cli.output import Files, open_by_name

if TYPE_CHECKING:
    from cudakit.core.bench.health import SuiteResult
    from cudakit.core.bench.result import BenchResult
    from cudakit.document import Document

# The ends of names; the first that fits says what the file holds.
FORMATS = ("nvbench.json", "json", "csv", "md", "html")


def opened(paths: Iterable[str], *, force: bool) -> AbstractContextManager[Files]:
    """Open every file of ``-o``. Raises UsageError for a name that does not say what it is to hold."""
    return open_by_name(paths, FORMATS, force=force)


def write(files: Files, result: BenchResult | SuiteResult) -> None:
    """Write the result into every file."""
    for form, file in files:
        file.write(_rendered(result, form))


def _rendered(result: BenchResult | SuiteResult, form: str) -> str | Iterable[str]:
    from cudakit.core.bench.present.nvbench import nvbench
    from cudakit.render import csv, html, json, markdown

    match form:
        case "json":
            return json.render(result)
        case "html":
            return html.render(document(result, detail=True))
        case "md":
            return markdown.render(document(result))
        case "csv":
            return csv.render(document(result))
    return nvbench(document(result))


def document(result: BenchResult | SuiteResult, *, detail: bool = False) -> Document:
    """Present a result; ``detail`` adds what suits a page better than a terminal."""
    from cudakit.core.bench.health import SuiteResult
    from cudakit.core.bench.present import present
    from cudakit.core.bench.present.health import present_health

    if isinstance(result, SuiteResult):
        return present_health(result, detail=detail)
    return present(result, detail=detail)
