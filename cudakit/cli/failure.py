"""The exit codes, and the report of a failure: one line and a hint."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum

import click

from cudakit.cli.output import printable, standard_error, standard_output
from cudakit.errors import CudakitError, EnvironmentUnusable, UsageError

# Of ``run`` and of timeout(1), env(1) and nohup(1) for their own failures: no program is likely to end so.
_NOT_STARTED = 125


class ExitCode(IntEnum):
    """What the exit code of a command says."""

    OK = 0  # the question is answered
    FINDINGS = 1  # answered, and something is wrong: a race, a regression, memory that grew
    USAGE = 2  # the command line cannot be carried out, or an input file cannot be used
    ENVIRONMENT = 3  # the machine lacks something: a driver, a GPU, a library, memory, disk space
    INTERNAL = 4  # something inside cudakit is wrong
    INTERRUPTED = 130  # stopped by Ctrl-C
    BROKEN_PIPE = 141  # the reader of the output went away, as in ``cudakit memviz x | head``


def report_error(
    error: BaseException, *, as_json: bool = False, json_to_stderr: bool = False
) -> int:
    """Print an error and return its exit code.

    ``as_json`` prints it on stdout as well, ``json_to_stderr`` prints only JSON, on stderr.
    """
    if os.environ.get("CUDAKIT_DEBUG"):
        _print_traceback(error)
    try:
        return _print_error(error, as_json=as_json, json_to_stderr=json_to_stderr)
    except BrokenPipeError:
        return ExitCode.BROKEN_PIPE
    finally:
        _flush_stdout()


@contextmanager
def before_the_start(*, as_json: bool) -> Iterator[None]:
    """Report what fails before ``run`` has started a program, and end with 125.

    An error of finding or executing the program keeps its own code: 126, 127.
    """
    try:
        yield
    except (click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        code = report_error(error, json_to_stderr=as_json)
        raise click.exceptions.Exit(code if code in (126, 127) else _NOT_STARTED) from error


def _print_error(error: BaseException, *, as_json: bool, json_to_stderr: bool) -> int:
    if _is_interrupt(error):
        click.echo(err=True)
        # After an interrupt inside an exec (creation of a dataclass), even a caught one, CPython ends
        # ``python -m`` by the signal; the next exec resets that (pythonrun.c, run_eval_code_obj).
        exec("")  # noqa: S102
        return ExitCode.INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return ExitCode.BROKEN_PIPE
    known = _as_cudakit_error(error)
    if json_to_stderr:
        standard_error().write(_as_json(known))
        return known.exit_code
    click.echo(f"cudakit: error: {printable(known.message)}", err=True)
    if known.hint:
        click.echo(f"hint: {printable(known.hint)}", err=True)
    if as_json and sys.stdout is not None:
        # The error is on stderr already: a failure to write JSON does not change the exit code.
        with suppress(BrokenPipeError, EnvironmentUnusable):
            standard_output().write(_as_json(known))
    return known.exit_code


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt caused the error, also if closing something failed after it."""
    while error is not None:
        if isinstance(error, (KeyboardInterrupt, click.Abort)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _as_json(error: CudakitError) -> str:
    from cudakit.render.json import render_error

    return render_error(error)


def _as_cudakit_error(error: BaseException) -> CudakitError:
    match error:
        case CudakitError():
            return error
        case click.ClickException():
            return UsageError(error.format_message(), hint=_help_hint(error))
        case MemoryError():
            return EnvironmentUnusable(
                "the machine ran out of memory", hint="use a machine with more, or a smaller input"
            )
        case OSError(strerror=str(reason)):
            where = f"{error.filename}: " if error.filename else ""
            return EnvironmentUnusable(f"{where}{reason}")
    return CudakitError(
        f"internal error: {type(error).__name__}: {error}",
        hint="please report it as a bug, with the traceback that CUDAKIT_DEBUG=1 prints",
    )


def _help_hint(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'cudakit'} --help"


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error, file=sys.stderr)


def _flush_stdout() -> None:
    """Flush stdout; drop the rest if its reader or its disk is gone, because the exit flushes again."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
