"""``cudakit completion``: shell completion for bash, zsh and fish."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, TypeAlias

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

from cudakit.cli.options import Command, option
from cudakit.errors import UsageError

Shell: TypeAlias = Literal["bash", "zsh", "fish"]

# The shell sets this variable when it asks for completions.
COMPLETION_VARIABLE = "_CUDAKIT_COMPLETE"


class _KeepsOptionName(ShellComplete):
    """Completes the whole word, also in ``--option=value``, which click completes without the option."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return completions that begin with the name of the option and "="."""
        completions = super().get_completions(args, incomplete)
        name_match = re.match(r"--?[\w-]+=", incomplete)
        for completion in completions:
            if completion.type == "plain" and name_match:
                completion.value = f"{name_match.group()}{completion.value}"
        return completions


class _Bash(_KeepsOptionName, BashComplete):
    """Completion for bash, which parses the line itself so that words keep their ":" and "="."""

    # click's script, except that it passes the complete line, because bash splits words at ":" and "=".
    source_template = Path(__file__).with_name("completion.bash").read_text("utf-8")

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the complete words after the program, and the incomplete one."""
        line = os.environ.get("COMP_LINE", "")
        words = split_arg_string(line)
        last_word = "" if not words or line[-1:].isspace() else words.pop()
        return words[1:], last_word

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Return completions of the part of the word that bash replaces."""
        completions = super().get_completions(args, incomplete)
        # Bash keeps the beginning of the word, up to its last word break.
        word_breaks = {":", "="} & set(os.environ.get("COMP_WORDBREAKS", ""))
        prefix_length = max(map(incomplete.rfind, word_breaks), default=-1) + 1
        for completion in completions:
            completion.value = completion.value.removeprefix(incomplete[:prefix_length])
        return completions


class _Zsh(_KeepsOptionName, ZshComplete):
    """Completion for zsh."""


class _Fish(_KeepsOptionName, FishComplete):
    """Completion for fish, also of lists with commas."""

    # click's script, except that a value may contain commas.
    source_template = Path(__file__).with_name("completion.fish").read_text("utf-8")


_CLASSES: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def complete(program: click.Command, instruction: str) -> int:
    """Print the completions of a word (``bash_complete``) or the script (``bash_source``) of a shell."""
    shell, _, action = instruction.partition("_")
    completion_class = _CLASSES.get(shell)
    if completion_class is None:
        return 2
    completion = completion_class(program, {}, "cudakit", COMPLETION_VARIABLE)
    click.echo(completion.source() if action == "source" else completion.complete())
    return 0


def script(shell: Shell) -> str:
    """Return the completion script of a shell."""
    return _CLASSES[shell](click.Command("cudakit"), {}, "cudakit", COMPLETION_VARIABLE).source()


@click.command(cls=Command)
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@option("--install", is_flag=True, help="Write the script to the user's completion directory.")
def completion(*, shell: Shell, install: bool) -> int:
    """Print the completion script of SHELL (bash, zsh or fish), or install it.

    The shell then completes commands, options, file names, and values such as data types, simulated GPUs,
    fields and check ids. --install replaces an earlier script of cudakit and changes no other file.

    \b
    cudakit completion bash --install
    source <(cudakit completion bash)        # for this shell only
    cudakit completion fish | source
    """
    text = script(shell)
    if not install:
        click.echo(text, nl=False)
        return 0
    path, next_step = _installation(shell)
    try:
        is_current = path.is_file() and path.read_text(encoding="utf-8") == text
        if not is_current:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}",
            hint=f"write the script to a file that your shell reads: cudakit completion {shell} > FILE",
        ) from error
    click.echo(f"{path} is up to date" if is_current else f"Wrote {path}", err=True)
    click.echo(next_step, err=True)
    return 0


def _installation(shell: Shell) -> tuple[Path, str]:
    """Return the file in which a shell looks for the user's completions, and the next step of the user."""
    match shell:
        case "bash":
            data_directory = _directory("XDG_DATA_HOME", ".local/share") / "bash-completion"
            user_directory = Path(
                os.environ.get("BASH_COMPLETION_USER_DIR", "").split(":")[0] or data_directory
            )
            path = user_directory / "completions" / "cudakit"
            return path, (
                "Start a new bash. If completion does not work there, the package bash-completion is "
                f"missing: add 'source {path}' to ~/.bashrc."
            )
        case "fish":
            path = _directory("XDG_CONFIG_HOME", ".config") / "fish/completions/cudakit.fish"
            return path, "Completion works in every new fish."
    return Path.home() / ".zfunc" / "_cudakit", (
        "Add this line to ~/.zshrc if it is not there, and start a new zsh:\n"
        "  fpath+=~/.zfunc; autoload -Uz compinit && compinit"
    )


def _directory(variable: str, default_path: str) -> Path:
    # The XDG Base Directory Specification ignores relative paths.
    directory = Path(os.environ.get(variable, ""))
    return directory if directory.is_absolute() else Path.home() / default_path
