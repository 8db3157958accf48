"""Generate docs/reference from commands, results, public functions and errors.

With ``--check`` no file is written, and the exit code is 1 if a page is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

import click
from reference_types import (
    field_comments,
    first_line,
    paragraphs,
    plain,
    python_page,
    result_class,
    result_page,
    schema_of,
    sections,
    table,
)

import cudakit.api
import cudakit.errors
from cudakit.cli import COMMANDS, ENVIRONMENT_VARIABLES, load_command, program
from cudakit.cli.bench import SHARED_TITLE, BenchGroup
from cudakit.cli.bench import load_command as load_benchmark
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import Command, help_records
from cudakit.cli.run import Launcher
from cudakit.devices.doctor.checks import SELF_TEST, THEMES
from cudakit.devices.doctor.variables import known_variables
from cudakit.errors import CudakitError

PAGES = Path(__file__).parent.parent / "docs" / "reference"
PACKAGE = Path(cudakit.errors.__file__).parent
NOTICE = "<!-- Written by scripts/docs; edit the code instead. -->"

# The command line that prints the JSON document, and the dataclass of the document, by page.
RESULTS = {
    "cache-json.md": ("cache show --json", "cudakit.cli.cache:CacheResult"),
    "bench-json.md": ("bench NAME --json", "cudakit.bench.result:BenchResult"),
    "bench-suite-json.md": ("bench suite --json", "cudakit.bench.health:SuiteResult"),
    "bench-fleet-json.md": (
        "bench suite --ray ADDRESS --json",
        "cudakit.bench.fleet.result:FleetResult",
    ),
    "bench-tuned-json.md": (
        "bench gemm --tune --json",
        "cudakit.bench.tuning.tuned:Tuned",
    ),
    "bench-compare-json.md": (
        "bench compare A B --json",
        "cudakit.bench.compare:Comparison",
    ),
    "devices-json.md": ("devices --json", "cudakit.devices.result:DevicesResult"),
    "devices-fields-json.md": (
        "devices --fields A,B --json",
        "cudakit.devices.result:FieldsResult",
    ),
    "devices-select-json.md": (
        "devices --select --json",
        "cudakit.devices.result:SelectResult",
    ),
    "devices-list-fields-json.md": (
        "devices --list-fields --json",
        "cudakit.devices.result:FieldsList",
    ),
    "doctor-json.md": ("doctor --json", "cudakit.devices.doctor.check:DoctorResult"),
    "doctor-explain-json.md": (
        "doctor --explain ID --json",
        "cudakit.devices.explain:CheckExplanation",
    ),
    "explain-json.md": ("explain TERM --json", "cudakit.devices.explain:Explanation"),
    "run-json.md": (
        "run --sanitize -o FILE.json",
        "cudakit.sanitize.races:SanitizeResult",
    ),
    "profile-json.md": ("profile FILE --json", "cudakit.profile.result:ProfileResult"),
    "profile-diff-json.md": (
        "profile FILE --diff BEFORE --json",
        "cudakit.profile.diff:ProfileDiff",
    ),
    "sanitize-json.md": ("sanitize FILE --json", "cudakit.sanitize.races:SanitizeResult"),
    "memviz-json.md": ("memviz --json", "cudakit.memory.result:MemoryResult"),
    "memviz-diff-json.md": (
        "memviz AFTER --diff BEFORE --json",
        "cudakit.memory.result:DiffResult",
    ),
    "memviz-what-if-json.md": (
        "memviz --what-if SETTINGS --json",
        "cudakit.memory.result:WhatIfResult",
    ),
}


# Remarks on command lines that no help lists, by page.
REMARKS = {"doctor-explain-json.md": "the earlier spelling of `cudakit explain ID`"}

EXIT_CODES_OF_RUN = (
    (
        "1",
        "the program succeeded, but it has races, launches that may race but whose accesses were not "
        "recorded, or ranks that call different collectives; or the recording is incomplete; or, with "
        "--require-gpu, no work of a real GPU was recorded; or, with --fail-on limit, a process "
        "reserved more memory than --limit. Races inside libraries count with --internal only",
    ),
    ("125", "cudakit failed before the program started"),
    ("126", "the program cannot be executed"),
    ("127", "the program was not found"),
)


def pages() -> dict[str, str]:
    """Return the text of every page by its name."""
    pages_by_name = {
        "checks.md": checks_page(),
        "environment-variables.md": variables_page(),
        "cudakit.md": program_page(),
        "errors.md": errors_page(),
        "exit-codes.md": exit_codes_page(),
        "python.md": python_page(),
    }
    for name in COMMANDS:
        pages_by_name |= dict(command_pages(name, load_command(name)))
    pages_by_name |= {
        page: result_page(command_line, dataclass_path)
        for page, (command_line, dataclass_path) in RESULTS.items()
    }
    return {page: f"{NOTICE}\n\n{text.rstrip()}\n" for page, text in pages_by_name.items()}


# --- commands --------------------------------------------------------------------------------------


def schemas_table() -> str:
    rows = []
    for page, (command_line, dataclass_path) in RESULTS.items():
        schema = schema_of(result_class(dataclass_path))
        remark = f"; {REMARKS[page]}" if page in REMARKS else ""
        rows.append((f"[`cudakit {command_line}`]({page}){remark}", f"`{schema}`"))
    return table(("Command", "Schema"), rows)


def program_page() -> str:
    commands = table(
        ("Command", "What it does"),
        ((f"[`cudakit {name}`]({name}.md)", line) for name, line in COMMANDS.items()),
    )
    variables = ((f"`{name}`", meaning) for name, meaning in ENVIRONMENT_VARIABLES)
    return sections(
        f"# cudakit\n\n{program.help}",
        commands,
        f"## Options\n\n{options(program_context())}",
        f"## JSON documents\n\n{schemas_table()}",
        f"## Environment variables\n\n{table(('Variable', 'Meaning'), variables)}",
    )


def command_pages(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """Yield the page of a command; for a group also the page of each of the group's commands."""
    subcommands = command.commands if isinstance(command, click.Group) else {}
    if isinstance(command, BenchGroup):
        subcommands = {subname: load_benchmark(subname) for subname in subcommands}
    context = click.Context(command, info_name=name, parent=program_context())
    yield f"{name}.md", command_page(context)
    for subname, subcommand in subcommands.items():
        subcontext = click.Context(subcommand, info_name=subname, parent=context)
        yield f"{name}-{subname}.md", command_page(subcontext)


def command_page(context: click.Context) -> str:
    command, name = context.command, context.command_path.removeprefix("cudakit ")
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    json_links = [
        f"* [`cudakit {command_line}`]({page})"
        for page, (command_line, _) in RESULTS.items()
        if f"{command_line} ".startswith(f"{name} ")
    ]
    return sections(
        f"# cudakit {name}",
        *paragraphs(command.help or ""),
        f"```\n{usage}\n```",
        subcommands_section(command, name),
        f"## Options\n\n{options(context)}",
        shared_options(command, context),
        f"## JSON\n\n{chr(10).join(json_links)}" if json_links else "",
        ""
        if isinstance(command, Launcher)
        else "The [exit codes](exit-codes.md) are those of every command.",
    )


def subcommands_section(command: click.Command, name: str) -> str:
    if not isinstance(command, click.Group):
        return ""
    rows = (
        (
            f"[`cudakit {name} {subname}`]({name}-{subname}.md)",
            subcommand.get_short_help_str(limit=200),
        )
        for subname, subcommand in sorted(command.commands.items())
    )
    return f"## Commands\n\n{table(('Command', 'What it does'), rows)}"


def program_context() -> click.Context:
    return click.Context(program, info_name="cudakit", **program.context_settings)


def options(context: click.Context) -> str:
    """Return the options of a command in Markdown, with a table for each group of options."""
    command = context.command
    if not isinstance(command, Command):
        return option_table(help_records(command.get_params(context), context))
    return sections(
        *(
            f"### {title}\n\n{option_group_text(command, title, parameters, context)}"
            for title, parameters in command.groups(context)
        )
    )


def option_group_text(
    command: Command, title: str, parameters: list[click.Parameter], context: click.Context
) -> str:
    """Return a table of options, or their names and a link to the page that describes them."""
    if title in command.help_by_title:
        names = ", ".join(f"`{option.opts[0]}`" for option in parameters)
        return f"{names}: see [`{command.help_by_title[title].removesuffix(' --help')}`](bench.md)."
    return option_table(help_records(parameters, context))


def shared_options(command: click.Command, context: click.Context) -> str:
    if not isinstance(command, BenchGroup):
        return ""
    return f"## {SHARED_TITLE}\n\n{option_table(command.shared_records(context))}"


def option_table(records: Iterable[tuple[str, str]]) -> str:
    rows = ((f"`{names}`", text.replace("  [", " [")) for names, text in records if text)
    return table(("Option", "Meaning"), rows)


# --- checks ----------------------------------------------------------------------------------------


def checks_page() -> str:
    checks = [(theme, check) for theme, group in {**THEMES, **SELF_TEST}.items() for check in group]
    rows = ((f"[{check.id}](#{check.id.lower()})", theme, check.title) for theme, check in checks)
    intro = (
        "The checks of [`cudakit doctor`](doctor.md). The meaning of an id never changes. "
        "The checks of the last theme use the GPU and run with `--deep` only. CK020 to CK025 know these "
        "[environment variables](environment-variables.md)."
    )
    return sections(
        f"# Checks\n\n{intro}",
        table(("Check", "Theme", "Passes if"), rows),
        *(
            f"## {check.id}\n\n**{check.title}**\n\n{plain(check.explanation)}"
            for _, check in checks
        ),
    )


def variables_page() -> str:
    rows = (
        (f"`{row.name}`", row.library, row.effect, row.source, row.check)
        for row in known_variables().values()
    )
    intro = (
        "The environment variables that `cudakit doctor --all` lists if they are set, and that "
        "`cudakit explain NAME` explains. The named check warns while a variable is on."
    )
    return sections(
        f"# Environment variables\n\n{intro}",
        table(("Variable", "Read by", "Effect", "Source", "Check"), rows),
    )


# --- exit codes and errors -------------------------------------------------------------------------


def exit_codes_page() -> str:
    comments = field_comments(ExitCode)
    rows = [(str(code.value), comments[code.name]) for code in ExitCode]
    return sections(
        f"# Exit codes\n\n{ExitCode.__doc__}",
        table(("Code", "Meaning"), rows),
        "[`cudakit run`](run.md) ends with the exit code or the signal of its program. Other codes:",
        table(("Code of `run`", "Meaning"), EXIT_CODES_OF_RUN),
    )


def errors_page() -> str:
    import_error_modules()
    rows = []
    for error in error_tree(cudakit.errors.CudakitError):
        is_public = getattr(cudakit, error.__name__, None) is error
        name = f"cudakit.{error.__name__}" if is_public else error.__name__
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        rows.append((f"`{name}`", bases, str(error.exit_code), first_line(error)))
    return sections(
        f"# Errors\n\n{plain(cudakit.errors.__doc__ or '')}",
        "Names without `cudakit.` are not public: catch one of their bases.",
        table(("Class", "Bases", "Exit code", "Meaning"), rows),
    )


def error_tree(base: type[CudakitError]) -> list[type[CudakitError]]:
    """Return an error class and all its subclasses, each class once and after its first base class."""
    tree = [base]
    for subclass in sorted(base.__subclasses__(), key=lambda error: error.__name__):
        tree += [error for error in error_tree(subclass) if error not in tree]
    return tree


def import_error_modules() -> None:
    """Import every module that defines an error class."""
    names = {"CudakitError"}
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    for _ in range(3):  # The depth of the tree of error classes.
        for path, source in sources.items():
            bases = "|".join(sorted(names))
            if subclasses := set(
                re.findall(rf"^class (\w+)\((?:\w+, )*(?:{bases})\b", source, re.M)
            ):
                names |= subclasses
                module = path.relative_to(PACKAGE.parent).with_suffix("")
                import_module(".".join(module.parts))


def main(arguments: list[str]) -> int:
    """Write the pages; with ``--check`` only print the names of pages that are out of date."""
    new_pages = pages()
    existing_pages = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    if "--check" in arguments:
        outdated = sorted(
            name
            for name in new_pages | existing_pages
            if new_pages.get(name) != existing_pages.get(name)
        )
        for name in outdated:
            print(f"docs/reference/{name} is out of date: run scripts/docs")
        return 1 if outdated else 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in existing_pages.keys() - new_pages.keys():
        (PAGES / name).unlink()
    for name, text in new_pages.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
