"""The files of ``cudakit bench``, whose names say what each holds, and the report beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeAlias

from cudakit.cli.output import Output, open_output
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from cudakit.core.bench.result import BenchResult

# The ends of names; the first that fits says what the file holds.
FORMATS = ("nvbench.json", "json", "csv", "md", "html")

# Open files, each with its format.
Files: TypeAlias = tuple[tuple[str, Output], ...]


@contextmanager
def opened(paths: Iterable[str], *, force: bool) -> Iterator[Files]:
    """Open every file of ``-o``; each appears complete when the block ends well, or not at all.

    Raises UsageError for a name that does not say what the file is to hold, before any is made.
    """
    wanted = [(_format(path), path) for path in paths]
    with ExitStack() as stack:
        yield tuple(
            (form, stack.enter_context(open_output(path, force=force))) for form, path in wanted
        )


def write(files: Files, result: BenchResult) -> None:
    """Write the result into every file."""
    for form, file in files:
        file.write(_rendered(result, form))


def _format(path: str) -> str:
    for form in FORMATS:
        if path.lower().endswith(f".{form}"):
            return form
    known = ", ".join(f".{form}" for form in FORMATS)
    raise UsageError(f"{path} does not say what it is to hold", hint=f"end its name in {known}")


def _rendered(result: BenchResult, form: str) -> str | Iterable[str]:
    from cudakit.core.bench.present import present
    from cudakit.render import csv, html, json, markdown, nvbench

    match form:
        case "json":
            return json.render(result)
        case "html":
            return html.render(present(result, detail=True))
        case "md":
            return markdown.render(present(result))
        case "csv":
            return csv.render(present(result))
    return nvbench.render(present(result))
