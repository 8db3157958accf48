"""The file of ``run --log``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING

import click

from cudakit.cli.output import open_binary_file, printable
from cudakit.errors import EnvironmentUnusable
from cudakit.trace.run_log import LogWriter, Outcome

if TYPE_CHECKING:
    from cudakit.sanitize.races import SanitizeResult
    from cudakit.trace.spool import Batch


class LogFile:
    """The file of ``--log``. If a write fails, the program continues, and ``complete`` raises the error."""

    def __init__(self, path: str, stack: ExitStack, *, force: bool) -> None:
        self._path = path
        self._failure: OSError | None = None
        self._open_file = stack.enter_context(ExitStack())
        self._writer = LogWriter(self._open_file.enter_context(open_binary_file(path, force=force)))

    def add(self, batch: Batch) -> None:
        """Append a batch of records."""
        if not self._failure:
            try:
                self._writer.add(batch)
            except OSError as error:
                self._failure = error

    def complete_with_result(self, result: SanitizeResult, *, quiet: bool) -> None:
        """Write the outcome of a race check to the file, close the file, and print its path.

        Raises EnvironmentUnusable if the file cannot be written.
        """
        field_names = (field.name for field in fields(Outcome))
        self.complete(
            Outcome(**{field_name: getattr(result, field_name) for field_name in field_names}),
            quiet=quiet,
        )

    def complete(self, outcome: Outcome, *, quiet: bool) -> None:
        """Write the outcome, close the file, and print its path.

        Raises EnvironmentUnusable if a write failed.
        """
        if self._failure:
            reason = f"cannot write {self._path}: {self._failure.strerror}"
            hint = "free space on the disk, or write to another directory"
            raise EnvironmentUnusable(reason, hint=hint) from self._failure
        self._writer.finish(outcome)
        self._open_file.close()
        if not quiet:
            click.echo(f"Wrote {printable(self._path)}", err=True)
