"""Options that commands share, their groups in the help, and types whose values the shell completes."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

from cudakit.cli.output import OutputOptions, Target, suffixes
from cudakit.errors import GpuUnavailable
from cudakit.units import parse_bytes, parse_ratio

Decorator: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]


# Maximum width of the terms in a list of a description.
_MAX_TERM_WIDTH = 30

# The title of the option group that every command has.
OUTPUT = "Output"

# --- options and commands with groups --------------------------------------------------------------


class Option(click.Option):
    """An option with a group in the help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = ""

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return the text that click appends to the help: the default, without a range such as ``x>=1``."""
        help_extra = super().get_help_extra(ctx)
        help_extra.pop("range", None)
        return help_extra


def option(*names: str, **attributes: Any) -> Decorator:
    """Return the decorator that adds an Option to a command."""
    return click.option(*names, cls=Option, **attributes)


def option_group(title: str, *options: Decorator) -> tuple[Decorator, ...]:
    """Put options under a heading of the help; the command needs ``cls=Command``."""

    def grouped(add_option: Decorator) -> Decorator:
        def add(command: Callable[..., Any]) -> Callable[..., Any]:
            command = add_option(command)
            vars(command)["__click_params__"][-1].group = title
            return command

        return add

    return tuple(map(grouped, options))


class _Formatter(click.HelpFormatter):
    """Wraps help between words only: names such as launch-to-finish stay on one line."""

    _NO_BREAK = "\N{NON-BREAKING HYPHEN}"

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", self._NO_BREAK))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        unbroken_rows = [(name, text.replace("-", self._NO_BREAK)) for name, text in rows]
        super().write_dl(unbroken_rows, col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(self._NO_BREAK, "-")


class _Context(click.Context):
    formatter_class = _Formatter


class Command(click.Command):
    """A command whose help lists options by group.

    ``help_by_title`` maps the title of a group to the help that describes its options: this help only names
    them.
    """

    context_class = _Context

    def __init__(
        self, *args: Any, help_by_title: dict[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.help_by_title = help_by_title or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments. Errors carry the context, so that their hint names the help of this command."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click sets no context for an option without its argument
            raise

    def format_help_text(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the description; lists of terms are wrapped like the options."""
        paragraphs = inspect.cleandoc(self.help or "").partition("\f")[0].split("\n\n")
        for paragraph in paragraphs:
            formatter.write_paragraph()
            with formatter.indentation():
                if terms := _described_terms(paragraph):
                    formatter.write_dl(terms, col_max=_MAX_TERM_WIDTH)
                else:
                    formatter.write_text(paragraph)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. If it has ``--gpu`` and finds no GPU, the hint names the simulated one."""
        try:
            return super().invoke(ctx)
        except GpuUnavailable as error:
            if "gpu" in ctx.params:
                error.hint += "; --gpu sim needs no GPU"
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of options under its title."""
        for title, options in self.groups(ctx):
            with formatter.section(title):
                if help_name := self.help_by_title.get(title):
                    option_names = ", ".join(option.opts[0] for option in options)
                    formatter.write_text(f"{option_names}: see {help_name}")
                else:
                    formatter.write_dl(help_records(options, ctx))

    def groups(self, ctx: click.Context) -> Iterator[tuple[str, list[click.Parameter]]]:
        """Yield the title and the visible options of each group; the last group has output and ``--help``."""
        options_by_title: dict[str, list[click.Parameter]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and not param.hidden:
                is_help = "--help" in param.opts and OUTPUT in options_by_title
                title = OUTPUT if is_help else getattr(param, "group", "")
                options_by_title.setdefault(title or "Options", []).append(param)
        output_options_of_command = options_by_title.pop(OUTPUT, None)
        yield from options_by_title.items()
        if output_options_of_command:
            yield OUTPUT, output_options_of_command


def _described_terms(paragraph: str) -> list[tuple[str, str]]:
    """Return the terms and descriptions of a preformatted list; empty for other paragraphs.

    Each line of a list has a term, two spaces or more, and its description, or continues the description.
    """
    marker, _, text = paragraph.partition("\n")
    if marker.strip() != "\b":
        return []
    terms: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = re.match(r"(\S+(?: \S+)*) {2,}(\S.*)", line)
        if match and "#" not in line:
            terms.append((match[1], match[2]))
        elif terms and line.startswith(" "):
            terms[-1] = (terms[-1][0], f"{terms[-1][1]} {line.strip()}")
        else:
            return []
    return terms


def help_records(options: Iterable[click.Parameter], ctx: click.Context) -> list[tuple[str, str]]:
    """Return the names and the description of each option."""
    records = (option.get_help_record(ctx) for option in options)
    return [record for record in records if record is not None]


def with_options(options: Sequence[Decorator], command: Callable[..., Any]) -> Callable[..., Any]:
    """Apply options so that the help lists them in order."""
    for add_option in reversed(options):
        command = add_option(command)
    return command


def collect_options(
    name: str, options_class: type, options: Sequence[Decorator], command: Callable[..., Any]
) -> Callable[..., Any]:
    """Add options to a command, which receives a dataclass of their values as the keyword ``name``."""

    @functools.wraps(command)
    def call_with_options(**values: Any) -> Any:
        option_values = {field.name: values.pop(field.name) for field in fields(options_class)}
        return command(**{name: options_class(**option_values)}, **values)

    return with_options(options, call_with_options)


# --- values ----------------------------------------------------------------------------------------


class Value(click.ParamType[Any]):
    """A value that ``parse`` converts, and for which the shell offers ``choices``.

    ``choices`` is a sequence of texts, a function that returns texts, or "module:NAME" of a sequence, which
    is imported for completion only. If ``is_list`` is true, the value is a comma-separated list, completed
    item by item.
    """

    name = "value"

    def __init__(
        self,
        choices: Sequence[str] | Callable[[], Iterable[str]] | str = (),
        parse: Callable[[str], Any] = str,
        *,
        is_list: bool = False,
    ) -> None:
        self._choices = choices
        self._parse = parse
        self._is_list = is_list

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,  # noqa: ARG002
        ctx: click.Context | None,  # noqa: ARG002
    ) -> Any:
        """Parse a text; a default may be parsed already."""
        return self._parse(value) if isinstance(value, str) else value

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """Offer the choices that begin with the incomplete word, or with the part after its last comma."""
        earlier_text, comma, last_value = (
            incomplete.rpartition(",") if self._is_list else ("", "", incomplete)
        )
        earlier_values = earlier_text.split(",")
        return [
            CompletionItem(f"{earlier_text}{comma}{choice}")
            for choice in self.choices()
            if choice.startswith(last_value) and choice not in earlier_values
        ]

    def choices(self) -> Iterable[str]:
        """Return the values that the shell offers."""
        if isinstance(self._choices, str):
            module, _, attribute = self._choices.partition(":")
            choice_names: Iterable[str] = getattr(import_module(module), attribute)
            return choice_names
        return self._choices() if callable(self._choices) else self._choices


# click does not check the path: "-" is valid, and the code that opens the file reports errors.
FILE = click.Path(readable=False, allow_dash=True)


def byte_size(text: str) -> int:
    """Parse the value of an option such as ``--limit 10GiB`` as bytes; used as ``type=byte_size``."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


class Seconds(click.FloatRange):
    """A number of seconds in a range. Its error names the range in words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            bounds = []
            if self.min is not None:
                bounds.append(f"{'above' if self.min_open else 'of at least'} {self.min:g}")
            if self.max is not None:
                bounds.append(f"at most {self.max:,.0f}")
            message = " ".join((f"{value!r} is not a number of seconds", " and ".join(bounds)))
            self.fail(message.rstrip(), param, ctx)


def percent(text: str) -> float:
    """Parse the value of an option such as ``--max-util 5%`` as 0.05; used as ``type=percent``.

    A plain 5 could mean 5% as well as 500%, and is refused.
    """
    try:
        ratio = parse_ratio(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if ratio > 1 and not text.strip().endswith("%"):
        raise click.BadParameter(
            f"{text!r} could mean {ratio:g}% or {100 * ratio:g}%; write the value with %"
        )
    return ratio


def growth_limit(kind: str) -> Callable[[str], float]:
    """Return the parser of ``KIND:PERCENT``, such as ``growth:5%``, which returns the ratio."""

    def parse(text: str) -> float:
        prefix, _, amount = text.partition(":")
        if prefix != kind or not amount:
            raise click.BadParameter(f"{text!r} is not {kind}:PERCENT, for example {kind}:5%")
        return percent(amount)

    return parse


# --- output ----------------------------------------------------------------------------------------


def output_options(
    formats: Sequence[str],
    *,
    report_stream: str = "standard output",
    format_limits: str = "",
) -> Decorator:
    """Add ``--json -o -f -q`` to a command, which receives them as the keyword ``output: OutputOptions``.

    ``report_stream`` is the stream to which the command writes its report and its JSON document.
    ``format_limits`` is a sentence of the help of ``-o`` on options with fewer formats.
    """
    limits_text = f"{format_limits} " if format_limits else ""
    stream_text = "" if report_stream == "standard output" else f" on {report_stream}"

    def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def call_with_options(
            *, json: bool, paths: tuple[str, ...], force: bool, quiet: bool, **other_options: Any
        ) -> Any:
            output = OutputOptions(
                json, tuple(map(Target, paths)), force, quiet, tuple(formats), report_stream
            )
            return command(output=output, **other_options)

        options = option_group(
            OUTPUT,
            option(
                "-o",
                "--output",
                "paths",
                type=FILE,
                metavar="FILE",
                multiple=True,
                help=f"Write the report to FILE instead of the terminal; - is {report_stream}. The suffix "
                f"selects the format: {suffixes(formats)}. {limits_text}Repeatable.",
            ),
            option("-f", "--force", is_flag=True, help="Replace existing files."),
            option(
                "--json",
                "json",
                is_flag=True,
                help=f"Print the result, or the error, as one JSON document{stream_text}.",
            ),
            option(
                "-q",
                "--quiet",
                is_flag=True,
                help="Print only the verdict, the findings and the main figures, one line each.",
            ),
        )
        return with_options(options, call_with_options)

    return add_options


def _gpu_choices() -> list[str]:
    from cudakit.gpu.machine import models

    return ["auto", "cuda", "sim", *(f"sim:{name}" for name in models())]


gpu_option = option(
    "--gpu",
    type=Value(_gpu_choices),
    metavar="auto|cuda|sim[:MODEL]",
    default="auto",
    show_default=True,
    help="Use the real GPUs (auto, cuda) or simulated ones (sim, sim:MODEL). MODEL is a100-mig, h200 (the "
    "model of plain sim), h200x2, jetson, t4x4-slow (four GPUs, one with a low memory clock) or wsl. "
    "Simulated results are labelled.",
)
