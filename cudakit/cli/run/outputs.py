"""The files of ``cudakit run``: those of ``-o``, whose suffix says what each holds, and the snapshot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from cudakit.cli.named_files import Files, open_by_name
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from cudakit.core.sanitize.result import SanitizeResult

FORMATS = ("html", "json", "sarif")


def opened(paths: Sequence[str], *, force: bool) -> AbstractContextManager[Files]:
    """Open every file of ``-o``. Raises UsageError for a name that does not say what it is to hold."""
    if "-" in paths:
        raise UsageError(
            "standard output belongs to the program", hint="name a file, as in -o races.json"
        )
    return open_by_name(paths, FORMATS, force=force)


def write(files: Files, result: SanitizeResult) -> None:
    """Write the races into every file. Raises EnvironmentUnusable where a disk is full."""
    for form, file in files:
        file.write(_rendered(result, form))
        file.flush()


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


def _rendered(result: SanitizeResult, form: str) -> str:
    from cudakit.core.sanitize.present import report
    from cudakit.render import html, json, sarif

    if form == "json":
        return json.render(result)
    document = report(result, top=0)
    return html.render(document) if form == "html" else sarif.render(document, root=os.getcwd())
