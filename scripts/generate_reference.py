"""Write docs/reference from the commands, the Results, the public functions and the errors.

With ``--check`` write nothing, and fail where a page is not what it would be.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np

import cudakit.api
import cudakit.errors
from cudakit.cli import COMMANDS, load_command, program
from cudakit.cli.bench import SHARED_TITLE, BenchGroup
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import Command, help_records
from cudakit.cli.run import Launcher
from cudakit.core.devices.diagnose.checks import SELF_TEST, THEMES
from cudakit.core.devices.diagnose.variable_table import known_variables
from cudakit.errors import CudakitError
from cudakit.units import Unavailable

PAGES = Path(__file__).parent.parent / "docs" / "reference"
PACKAGE = Path(cudakit.errors.__file__).parent
NOTICE = "<!-- Written by scripts/docs; edit the code instead. -->"

# A page, the command line that prints such JSON, and the dataclass behind it.
RESULTS = {
    "bench-json.md": ("bench NAME --json", "cudakit.core.bench.result:BenchResult"),
    "bench-suite-json.md": ("bench suite --json", "cudakit.core.bench.health:SuiteResult"),
    "bench-tuned-json.md": (
        "bench gemm --tune --json",
        "cudakit.core.bench.tuning.tuned:Tuned",
    ),
    "bench-compare-json.md": (
        "bench compare A B --json",
        "cudakit.core.bench.compare:Comparison",
    ),
    "devices-json.md": ("devices --json", "cudakit.core.devices.result:DevicesResult"),
    "devices-fields-json.md": (
        "devices --fields A,B --json",
        "cudakit.core.devices.result:FieldsResult",
    ),
    "devices-select-json.md": (
        "devices --select --json",
        "cudakit.core.devices.result:SelectResult",
    ),
    "doctor-json.md": ("doctor --json", "cudakit.core.devices.diagnose.check:DoctorResult"),
    "doctor-explain-json.md": (
        "doctor --explain ID --json",
        "cudakit.core.devices.explain:CheckExplanation",
    ),
    "explain-json.md": ("explain TERM --json", "cudakit.core.devices.explain:Explained"),
    "run-json.md": (
        "run --sanitize -o FILE.json",
        "cudakit.core.sanitize.result:SanitizeResult",
    ),
    "memviz-json.md": ("memviz --json", "cudakit.core.memory.result:MemoryResult"),
    "memviz-diff-json.md": (
        "memviz AFTER --diff BEFORE --json",
        "cudakit.core.memory.result:DiffResult",
    ),
    "memviz-what-if-json.md": (
        "memviz --what-if SETTINGS --json",
        "cudakit.core.memory.whatif.result:WhatIfResult",
    ),
}

PYTHON_INTRO = """The public names of `import cudakit`. Errors are raised as one of the [errors](errors.md).

Python calls for commands return the Result that the command prints with `--json`. The other commands have
no Python call: run them with `--json` and read the document."""
PYTHON_CALLS = (
    ("`cudakit devices`", "`cudakit.devices()`"),
    ("`cudakit memviz`", "`cudakit.memviz()`, `cudakit.memviz_diff()`, `cudakit.memviz_what_if()`"),
    ("`cudakit run --sanitize`", "`cudakit.sanitize()`, for a block of code"),
    ("`cudakit run --memory`", "`cudakit.record_memory()`, for a block of code"),
    ("`cudakit bench`, `cudakit doctor`", "none"),
)

RUN_CODES = (
    ("1", "the program succeeded, and there were races"),
    ("125", "cudakit failed before the program started"),
    ("126", "the program cannot be executed"),
    ("127", "the program was not found"),
)

WORDS = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    Any: "any value",
    object: "any value",
}


def pages() -> dict[str, str]:
    """Return the text of every page by its name."""
    made = {
        "checks.md": checks_page(),
        "environment-variables.md": variables_page(),
        "cudakit.md": program_page(),
        "errors.md": errors(),
        "exit-codes.md": exit_codes(),
        "python.md": python_page(),
    }
    for name in COMMANDS:
        made |= dict(command_pages(name, load_command(name)))
    made |= {page: result_page(line, home) for page, (line, home) in RESULTS.items()}
    return {page: f"{NOTICE}\n\n{text.rstrip()}\n" for page, text in made.items()}


# --- commands --------------------------------------------------------------------------------------


def schemas_table() -> str:
    rows = []
    for page, (line, home) in RESULTS.items():
        rows.append((f"[`cudakit {line}`]({page})", f"`{schema_of(result_class(home))}`"))
    return table(("Command", "Schema"), rows)


def program_page() -> str:
    commands = table(
        ("Command", "What it does"),
        ((f"[`cudakit {name}`]({name}.md)", line) for name, (_, line) in COMMANDS.items()),
    )
    epilog = (program.epilog or "").replace("\b\n", "")
    return sections(
        f"# cudakit\n\n{program.help}",
        commands,
        f"## Options\n\n{options(program_context())}",
        f"## JSON documents\n\n{schemas_table()}",
        f"## Environment\n\n```\n{epilog.strip()}\n```",
    )


def command_pages(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """Write the page of a command, and of each command in it."""
    members = command.commands if isinstance(command, click.Group) else {}
    context = click.Context(command, info_name=name, parent=program_context())
    yield f"{name}.md", command_page(context)
    for inner, member in members.items():
        within = click.Context(member, info_name=inner, parent=context)
        yield f"{name}-{inner}.md", command_page(within)


def command_page(context: click.Context) -> str:
    command, name = context.command, context.command_path.removeprefix("cudakit ")
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    forms = [
        f"* [`cudakit {line}`]({page})"
        for page, (line, _) in RESULTS.items()
        if f"{line} ".startswith(f"{name} ")
    ]
    return sections(
        f"# cudakit {name}",
        *blocks(command.help or ""),
        f"```\n{usage}\n```",
        members_of(command, name),
        f"## Options\n\n{options(context)}",
        shared_options(command, context),
        f"## JSON\n\n{chr(10).join(forms)}" if forms else "",
        ""
        if isinstance(command, Launcher)
        else "The [exit codes](exit-codes.md) are those of every command.",
    )


def members_of(command: click.Command, name: str) -> str:
    if not isinstance(command, click.Group):
        return ""
    rows = (
        (f"[`cudakit {name} {inner}`]({name}-{inner}.md)", member.get_short_help_str(limit=200))
        for inner, member in sorted(command.commands.items())
    )
    return f"## Commands\n\n{table(('Command', 'What it does'), rows)}"


def program_context() -> click.Context:
    return click.Context(program, info_name="cudakit", **program.context_settings)


def options(context: click.Context) -> str:
    """Return the options of a command, a table for each group."""
    command = context.command
    if not isinstance(command, Command):
        return option_table(help_records(command.get_params(context), context))
    return sections(
        *(
            f"### {title}\n\n{group_text(command, title, members, context)}"
            for title, members in command.groups(context)
        )
    )


def group_text(
    command: Command, title: str, members: list[click.Parameter], context: click.Context
) -> str:
    """Return a table of options, or their names and a link to the page that describes them."""
    if title in command.described_in:
        names = ", ".join(f"`{option.opts[0]}`" for option in members)
        return f"{names}: see [`{command.described_in[title].removesuffix(' --help')}`](bench.md)."
    return option_table(help_records(members, context))


def shared_options(command: click.Command, context: click.Context) -> str:
    if not isinstance(command, BenchGroup):
        return ""
    return f"## {SHARED_TITLE}\n\n{option_table(command.shared_records(context))}"


def option_table(records: Iterable[tuple[str, str]]) -> str:
    rows = ((f"`{names}`", text.replace("  [", " [")) for names, text in records if text)
    return table(("Option", "Meaning"), rows)


# --- checks ----------------------------------------------------------------------------------------


def checks_page() -> str:
    listed = [
        (theme, check) for theme, members in {**THEMES, **SELF_TEST}.items() for check in members
    ]
    rows = ((f"[{check.id}](#{check.id.lower()})", theme, check.title) for theme, check in listed)
    intro = (
        "The checks of [`cudakit doctor`](doctor.md). The meaning of an id never changes. "
        "The checks of the last theme use the GPU and run with `--deep` only. CK020 to CK024 know these "
        "[environment variables](environment-variables.md)."
    )
    return sections(
        f"# Checks\n\n{intro}",
        table(("Check", "Theme", "Passes if"), rows),
        *(
            f"## {check.id}\n\n**{check.title}**\n\n{plain(check.explanation)}"
            for _, check in listed
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


# --- results ---------------------------------------------------------------------------------------


def result_page(line: str, home: str) -> str:
    result = result_class(home)
    does = "writes" if " -o " in line else "prints"
    intro = (
        f"The JSON document that `cudakit {line}` {does}. Its `schema` is `{schema_of(result)}`. "
        "Values that are not available are null."
    )
    return sections(f"# cudakit {line}\n\n{intro}", *map(record, records(result)))


def result_class(home: str) -> type:
    module, attribute = home.split(":")
    return typing.cast(type, getattr(import_module(module), attribute))


def schema_of(result: type) -> str:
    """Return the schema: a class attribute, or the constant of the module for a field."""
    schema = getattr(result, "schema", None)
    if isinstance(schema, str):
        return schema
    prefix = "DIFF_" if result.__name__ == "DiffResult" else ""
    return str(getattr(sys.modules[result.__module__], f"{prefix}SCHEMA"))


def records(result: type) -> list[type]:
    """List a dataclass and all that it holds, in the order of a first reading."""
    found: list[type] = []
    waiting = [result]
    while waiting:
        current = waiting.pop(0)
        if current not in found:
            found.append(current)
            waiting += [part for _, hint, _ in members(current) for part in parts(hint)]
    return found


def record(current: type) -> str:
    rows = [(f"`{key}`", wording(hint), note) for key, hint, note in members(current)]
    return sections(
        f"## {current.__name__}",
        plain(inspect.getdoc(current) or ""),
        table(("Field", "Type", "Meaning"), rows),
    )


def members(current: type) -> Iterator[tuple[str, Any, str]]:
    """Walk the JSON keys of a dataclass with their types and what the source says of them."""
    hints, said = typing.get_type_hints(current), notes(current)
    for field in dataclasses.fields(current):
        key = field.metadata.get("json", field.name)
        if key is not None:
            yield key, hints[field.name], said.get(field.name, "")


def parts(hint: Any) -> list[type]:
    """List the dataclasses that a type is made of."""
    if dataclasses.is_dataclass(hint) and hint is not Unavailable:
        return [typing.cast(type, hint)]
    return [part for inner in typing.get_args(hint) for part in parts(inner)]


def wording(hint: Any) -> str:
    """Say in words what JSON has for a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(sorted(dict.fromkeys(map(wording, inner)), key="null".__eq__))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is np.ndarray:
        return "array of numbers"
    if origin in (tuple, list):
        return f"array of {', '.join(wording(item) for item in inner if item is not ...)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"object of {wording(inner[1])}"
    return word(hint)


def word(hint: Any) -> str:
    if hint in (None, type(None), Unavailable):
        return "null"
    if dataclasses.is_dataclass(hint):
        name = typing.cast(type, hint).__name__
        return f"[{name}](#{name.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member.name.lower()}`" for member in hint)
    return WORDS[hint]


# --- Python ----------------------------------------------------------------------------------------


def python_page() -> str:
    public = [getattr(cudakit, name) for name in cudakit.__all__]
    functions = filter(inspect.isfunction, public)
    classes = [found for found in public if inspect.isclass(found) and is_no_error(found)]
    modules = filter(inspect.ismodule, public)
    return sections(
        f"# Python\n\n{PYTHON_INTRO}",
        table(("Command", "Python"), PYTHON_CALLS),
        *map(function_section, functions),
        *map(class_section, classes),
        *map(module_section, modules),
    )


def module_section(module: types.ModuleType) -> str:
    """Write the section of a public module: its docstring and its functions."""
    name = module.__name__.rpartition(".")[2]
    functions = [
        found
        for found in vars(module).values()
        if inspect.isfunction(found) and found.__module__ == module.__name__
    ]
    return sections(
        f"## cudakit.{name}",
        *blocks(module.__doc__ or ""),
        *(function_section(found, within=f"{name}.") for found in functions),
    )


def function_section(function: types.FunctionType, *, within: str = "") -> str:
    source = inspect.getsource(function)
    definition = typing.cast(ast.FunctionDef, ast.parse(source).body[0])
    head = "".join(source.splitlines(keepends=True)[: definition.body[0].lineno - 1])
    return sections(
        f"##{'#' * bool(within)} cudakit.{within}{function.__name__}",
        f"```\n{head.rstrip().removesuffix(':')}\n```",
        *blocks(function.__doc__ or ""),
    )


def is_no_error(found: type) -> bool:
    return not issubclass(found, Exception)


def class_section(found: type) -> str:
    """Write how an object is made, and a line on each of its members that are ours."""
    made = getattr(found, "__init__")  # noqa: B009  of the class, whatever its subclasses have
    rows = [(f"`{name}{form}`", said) for name, form, said in public_members(found)]
    return sections(
        f"## cudakit.{found.__name__}",
        f"```\n{found.__name__}{parameters(made)}\n```",
        *blocks(found.__doc__ or ""),
        table(("Member", "What it does"), rows),
    )


def public_members(found: type) -> Iterator[tuple[str, str, str]]:
    """Walk what a class has that is documented: fields, methods, properties, the most general ones last."""
    called = typing.get_type_hints(found)
    if dataclasses.is_dataclass(found):
        said = notes(found)
        yield from ((name, "", said[name]) for name in called)
    else:
        for name, hint in called.items():
            if not name.startswith("_") and first_line(hint):
                yield name, parameters(hint.__call__), first_line(hint)
    seen = set(called)
    for base in found.__mro__:
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen or not base.__module__.startswith("cudakit"):
                continue
            seen.add(name)
            if first_line(member):
                in_python_or_c = types.FunctionType | types.MethodDescriptorType
                method = member.__func__ if isinstance(member, classmethod) else member
                is_method = isinstance(method, in_python_or_c)
                yield name, parameters(method) if is_method else "", first_line(member)


def parameters(function: Any) -> str:
    """Return the parameters of a method as they are called, without types."""
    signature = inspect.signature(function)
    bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()][1:]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def first_line(member: object) -> str:
    return plain(getattr(member, "__doc__", None) or "").partition("\n")[0]


# --- exit codes and errors -------------------------------------------------------------------------


def exit_codes() -> str:
    said = notes(ExitCode)
    rows = [(str(code.value), said[code.name]) for code in ExitCode]
    return sections(
        f"# Exit codes\n\n{ExitCode.__doc__}",
        table(("Code", "Meaning"), rows),
        "[`cudakit run`](run.md) ends with the exit code or the signal of its program. Other codes:",
        table(("Code of `run`", "Meaning"), RUN_CODES),
    )


def errors() -> str:
    import_error_modules()
    rows = []
    for found in error_tree(cudakit.errors.CudakitError):
        public = getattr(cudakit, found.__name__, None) is found
        name = f"cudakit.{found.__name__}" if public else found.__name__
        bases = ", ".join(f"`{base.__name__}`" for base in found.__bases__)
        rows.append((f"`{name}`", bases, str(found.exit_code), first_line(found)))
    return sections(
        f"# Errors\n\n{plain(cudakit.errors.__doc__ or '')}",
        "Names without `cudakit.` are not public: catch one of their bases.",
        table(("Class", "Bases", "Exit code", "Meaning"), rows),
    )


def error_tree(base: type[CudakitError]) -> list[type[CudakitError]]:
    """List an error and its subclasses, each class once, after its first base."""
    found = [base]
    for inner in sorted(base.__subclasses__(), key=lambda each: each.__name__):
        found += [each for each in error_tree(inner) if each not in found]
    return found


def import_error_modules() -> None:
    """Import every module that defines a subclass of an error."""
    names = {"CudakitError"}
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    for _ in range(3):  # an error, its subclass and the subclass of that
        for path, source in sources.items():
            bases = "|".join(sorted(names))
            if new := set(re.findall(rf"^class (\w+)\((?:\w+, )*(?:{bases})\b", source, re.M)):
                names |= new
                module = path.relative_to(PACKAGE.parent).with_suffix("")
                import_module(".".join(module.parts))


# --- words -----------------------------------------------------------------------------------------


def notes(owner: type) -> dict[str, str]:
    """Return the comment behind each field or member of a class, or else the one above it."""
    said: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("cudakit"):
            said |= own_notes(textwrap.dedent(inspect.getsource(base)))
    return said


def own_notes(source: str) -> dict[str, str]:
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    said, last = {}, 0
    for node in typing.cast(ast.ClassDef, ast.parse(source).body[0]).body:
        above = " ".join(
            comments[line] for line in range(last + 1, node.lineno) if line in comments
        )
        last = node.end_lineno or node.lineno
        for target in targets(node):
            said[target] = plain(comments.get(last, above))
    return said


def targets(node: ast.stmt) -> list[str]:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
    return []


def plain(text: str) -> str:
    return inspect.cleandoc(text).replace("``", "`")


def blocks(text: str) -> list[str]:
    """Divide a text at empty lines; what must keep its lines is fenced."""
    return [block(part) for part in inspect.cleandoc(text).split("\n\n")]


def block(text: str) -> str:
    if text.startswith("\b\n"):
        return f"```\n{text[2:]}\n```"
    return f"```pycon\n{text}\n```" if text.startswith(">>>") else plain(text)


def sections(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def main(arguments: list[str]) -> int:
    """Write the pages, or with ``--check`` name those that differ."""
    made = pages()
    there = {place.name: place.read_text(encoding="utf-8") for place in PAGES.glob("*.md")}
    if "--check" in arguments:
        differ = sorted(name for name in made | there if made.get(name) != there.get(name))
        for name in differ:
            print(f"docs/reference/{name} is not what the code says: run scripts/docs")
        return 1 if differ else 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in there.keys() - made.keys():
        (PAGES / name).unlink()
    for name, text in made.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
