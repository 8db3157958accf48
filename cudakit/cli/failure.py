"""Exit codes, the report of an error (one line and a hint), and interrupts."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any

import click

from cudakit.cli.output import Output, printable, standard_error
from cudakit.errors import CudakitError, EnvironmentUnusable, UsageError

# The exit code of ``cudakit run`` if cudakit itself fails: that of timeout(1), env(1) and nohup(1), which
# programs seldom use.
_NOT_STARTED = 125
# Maximum number of characters of a message, which may quote a file, and of a hint, which may list many names.
_MAX_MESSAGE_LENGTH = 500
_MAX_HINT_LENGTH = 1000


class ExitCode(IntEnum):
    """The exit codes of every command."""

    OK = 0  # no problem was found
    FINDINGS = 1  # a problem was found: a race, a failed check, wrong values, a --fail-on condition
    USAGE = 2  # the command line is invalid, or an input file cannot be used
    ENVIRONMENT = 3  # the machine lacks a driver, a GPU, a library, memory or disk space
    INTERNAL = 4  # a bug in cudakit
    INTERRUPTED = 130  # stopped by Ctrl-C
    BROKEN_PIPE = 141  # the reader of the output closed the pipe, as in ``cudakit memviz x | head``


def report_error(
    error: BaseException,
    *,
    open_json_output: Callable[[], Output] | None = None,
    replace_exit_code: Callable[[int], int] = lambda exit_code: exit_code,
) -> int:
    """Print an error and return its exit code, which ``replace_exit_code`` can change.

    The error is one line and a hint on standard error, or a JSON document on the stream that
    ``open_json_output`` returns.
    """
    if os.environ.get("CUDAKIT_DEBUG"):
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    try:
        if _is_interrupt(error):
            click.echo(err=True)
            # CPython ends ``python -m`` by the signal if the interrupt was raised inside an exec (such as the
            # creation of a dataclass), even if it was caught. The next exec resets this state (pythonrun.c,
            # run_eval_code_obj).
            exec("")  # noqa: S102
            return ExitCode.INTERRUPTED
        if isinstance(error, BrokenPipeError):
            return ExitCode.BROKEN_PIPE
        cudakit_error = _as_cudakit_error(error)
        exit_code = replace_exit_code(cudakit_error.exit_code)
        if not (open_json_output and _write_json(cudakit_error, exit_code, open_json_output)):
            message = _shorten(cudakit_error.message, _MAX_MESSAGE_LENGTH)
            click.echo(f"cudakit: error: {message}", err=True)
            if cudakit_error.hint:
                click.echo(f"hint: {_shorten(cudakit_error.hint, _MAX_HINT_LENGTH)}", err=True)
        return exit_code
    except BrokenPipeError:
        return ExitCode.BROKEN_PIPE
    finally:
        # If stdout cannot be flushed, redirect it to /dev/null, because Python flushes again at exit.
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def errors_before_start(*, as_json: bool) -> Iterator[None]:
    """Report an error that precedes the start of the program of ``run``, and end with 125.

    A program that cannot be executed or found gives 126 or 127.
    """
    try:
        yield
    except (click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        exit_code = report_error(
            error,
            open_json_output=standard_error if as_json else None,
            replace_exit_code=lambda code: code if code in (126, 127) else _NOT_STARTED,
        )
        raise click.exceptions.Exit(exit_code) from error


def _write_json(error: CudakitError, exit_code: int, open_output: Callable[[], Output]) -> bool:
    """Write an error as a JSON document; return False if the stream is closed or its disk is full."""
    from cudakit.report.json import render_error

    try:
        stream = open_output()
        stream.write(render_error(error, exit_code))
        stream.flush()
    except (BrokenPipeError, CudakitError):
        return False
    return True


def _shorten(text: str, limit: int) -> str:
    from cudakit.report.escape import shorten

    return shorten(printable(text), limit)


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt caused the error, directly or in the exceptions that led to it."""
    while error is not None:
        if isinstance(error, (KeyboardInterrupt, click.Abort)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _as_cudakit_error(error: BaseException) -> CudakitError:
    match error:
        case CudakitError():
            return error
        case click.NoSuchOption():
            from difflib import get_close_matches

            # Options that resemble this one even without the leading dashes.
            options = {option.lstrip("-"): option for option in error.possibilities or ()}
            similar = get_close_matches(error.option_name.lstrip("-"), options)
            error = click.NoSuchOption(
                error.option_name, possibilities=[options[name] for name in similar], ctx=error.ctx
            )
            return UsageError(_as_message(error.format_message()), hint=_help_hint(error))
        case click.ClickException():
            return UsageError(_as_message(error.format_message()), hint=_help_hint(error))
        case MemoryError():
            return EnvironmentUnusable(
                "the machine is out of memory",
                hint="use a smaller input or a machine with more memory",
            )
        case OSError(strerror=str(reason)):
            file_prefix = f"{error.filename}: " if error.filename else ""
            return EnvironmentUnusable(f"{file_prefix}{reason}")
    return CudakitError(
        f"internal error: {type(error).__name__}: {error}",
        hint="please report it as a bug, with the traceback that CUDAKIT_DEBUG=1 prints",
    )


def _as_message(text: str) -> str:
    """Return a message of click in the style of cudakit: lower case at the start, no full stop."""
    message = re.sub("is not a valid integer( range)?", "is not an integer", text)
    message = message.replace("is not a valid float", "is not a number")
    message = re.sub(r"is not in the range x>=(\d+)", r"is less than \1", message)
    message = re.sub(r"the range (\d+)<=x<=(\d+)", r"the range \1 to \2", message)
    message = re.sub(
        r"got unexpected extra (arguments?) \((.*)\)", r"unexpected \1: \2", message, flags=re.I
    )
    return (message[:1].lower() + message[1:]).removesuffix(".")


def _help_hint(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None) or click.get_current_context(silent=True)
    return f"see {context.command_path if context else 'cudakit'} --help"


# --- Ctrl-C and SIGTERM at safe points of long work ------------------------------------------------


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C and SIGTERM until the block calls the yielded function; a second signal is immediate.

    KeyboardInterrupt between any two instructions can leave an object half-initialized, which then fails to
    close. The handler is only installed if the default handler is in place, and only in the main thread,
    because no other thread may call signal.signal.
    """
    is_pending = False

    def defer_interrupt(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001 as signal calls it
        nonlocal is_pending
        if is_pending:
            raise KeyboardInterrupt
        is_pending = True

    def deliver_interrupt() -> None:
        nonlocal is_pending
        if is_pending:
            is_pending = False
            raise KeyboardInterrupt

    with _handled_by(defer_interrupt, signal.SIGINT, signal.SIGTERM):
        yield deliver_interrupt


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt in the block, so that the block deletes its files."""
    with _handled_by(signal.default_int_handler, signal.SIGTERM):
        yield


@contextmanager
def _handled_by(handler: Callable[..., Any], *signal_numbers: signal.Signals) -> Iterator[None]:
    """Replace the default handlers of signals in the block, if this is the main thread."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    default_handlers = {
        signal_number: signal.getsignal(signal_number)
        for signal_number in signal_numbers
        if is_main_thread
        and signal.getsignal(signal_number) in (signal.default_int_handler, signal.SIG_DFL)
    }
    for signal_number in default_handlers:
        signal.signal(signal_number, handler)
    try:
        yield
    finally:
        for signal_number, default_handler in default_handlers.items():
            signal.signal(signal_number, default_handler)
