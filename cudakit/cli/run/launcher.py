"""A command that starts somebody's program, and the exit code of what fails before that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from cudakit.cli.failure import report

# That of timeout(1), env(1) and nohup(1) for their own failures: no program is likely to end so.
NOT_STARTED = 125


class Launcher(click.Command):
    """A command whose own errors on the command line end with 125: other codes are the program's."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the command line."""
        with before_the_start():
            return super().make_context(*args, **kwargs)


@contextmanager
def before_the_start() -> Iterator[None]:
    """Report what fails in the block in one line and a hint, and end with 125."""
    try:
        yield
    except (click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        code = report(error, as_json=False)
        # What cannot be executed, or is not there, has codes of its own.
        own = code in (126, 127)
        raise click.exceptions.Exit(code if own else NOT_STARTED) from error
