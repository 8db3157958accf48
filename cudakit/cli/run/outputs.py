"""The files of ``cudakit run``: those of ``-o``, whose suffix says what each holds, and the snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypeAlias

from cudakit.cli.output import Output, open_output
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from cudakit.core.sanitize.result import SanitizeResult

FORMATS = ("html", "json", "sarif")

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


def write(files: Files, result: SanitizeResult) -> None:
    """Write the races into every file."""
    for form, file in files:
        file.write(_rendered(result, form))


def snapshot_file(path: str, *, force: bool) -> Path:
    """Check that torch's snapshot can be written under this name. Raises UsageError."""
    target = Path(path)
    stem, suffix = os.path.splitext(path)
    if not target.parent.is_dir():
        raise UsageError(f"there is no directory {target.parent}", hint="make it, or name another")
    if target.is_dir():
        raise UsageError(f"{path} is a directory", hint="name a file in it: --snapshot FILE")
    for name in (path, f"{stem}-oom{suffix}"):
        if Path(name).exists() and not force:
            raise UsageError(
                f"{name} exists", hint="use --force to replace it, or --snapshot FILE for another"
            )
    return target


def _format(path: str) -> str:
    if path == "-":
        raise UsageError(
            "standard output belongs to the program", hint="name a file, as in -o races.json"
        )
    found = PurePath(path).suffix.removeprefix(".").lower()
    if found not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise UsageError(f"{path} does not say what it is to hold", hint=f"end its name in {known}")
    return found


def _rendered(result: SanitizeResult, form: str) -> str:
    from cudakit.core.sanitize.present import report
    from cudakit.render import html, json, sarif

    if form == "json":
        return json.render(result)
    document = report(result, top=0)
    return html.render(document) if form == "html" else sarif.render(document, root=os.getcwd())
