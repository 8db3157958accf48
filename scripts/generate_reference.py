"""Generate docs/reference from commands, results, public functions and errors.

With ``--check`` no file is written, and the exit code is 1 if a page is out of date.
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

import cudakit
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
from cudakit.units import Unavailable

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


# --- Describe dataclasses, functions and classes in Markdown, from annotations, docstrings and comments ---

PYTHON_INTRO = """The public names of `import cudakit`. Errors are raised as one of the [errors](errors.md).

Python calls for commands return the Result that the command prints with `--json`. The other commands have
no Python call: run them with `--json`, and read the document."""
PYTHON_CALLS = (
    ("`cudakit devices`", "`cudakit.devices()`"),
    ("`cudakit memviz`", "`cudakit.memviz()`, `cudakit.memviz_diff()`, `cudakit.memviz_what_if()`"),
    ("`cudakit run --sanitize`", "`cudakit.sanitize()`, for a block of code"),
    ("`cudakit run --memory`", "`cudakit.record_memory()`, for a block of code"),
    ("`cudakit run --profile`", "`cudakit.profile()`, for a block of code"),
    ("all other commands", "none"),
)

JSON_TYPE_NAMES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    Any: "any value",
    object: "any value",
}


# --- results ---------------------------------------------------------------------------------------


def result_page(command_line: str, dataclass_path: str) -> str:
    result = result_class(dataclass_path)
    verb = "writes" if " -o " in command_line else "prints"
    intro = (
        f"The JSON document that `cudakit {command_line}` {verb}. Its `schema` is `{schema_of(result)}`. "
        "Values that are not available are null."
    )
    return sections(f"# cudakit {command_line}\n\n{intro}", *map(record_section, records(result)))


def result_class(dataclass_path: str) -> type:
    """Import the dataclass at a path such as ``cudakit.bench.result:BenchResult``."""
    module, attribute = dataclass_path.split(":")
    return typing.cast("type", getattr(import_module(module), attribute))


def schema_of(result: type) -> str:
    """Return the schema of a result: the class attribute, or otherwise the constant of the module."""
    schema = getattr(result, "schema", None)
    if isinstance(schema, str):
        return schema
    prefix = {"DiffResult": "DIFF_", "WhatIfResult": "WHAT_IF_"}.get(result.__name__, "")
    return str(getattr(sys.modules[result.__module__], f"{prefix}SCHEMA"))


def records(result: type) -> list[type]:
    """Return a dataclass and all dataclasses in the types of its fields, breadth first."""
    types: list[type] = []
    waiting = [result]
    while waiting:
        current = waiting.pop(0)
        if current not in types:
            types.append(current)
            waiting += [
                nested for _, hint, _ in json_fields(current) for nested in nested_dataclasses(hint)
            ]
    return types


def record_section(current: type) -> str:
    rows = [(f"`{key}`", json_type(hint), comment) for key, hint, comment in json_fields(current)]
    return sections(
        f"## {current.__name__}",
        plain(inspect.getdoc(current) or ""),
        table(("Field", "Type", "Meaning"), rows),
    )


def json_fields(current: type) -> Iterator[tuple[str, Any, str]]:
    """Yield the JSON key, the type and the comment of each field of a dataclass."""
    hints, comments = typing.get_type_hints(current), field_comments(current)
    for field in dataclasses.fields(current):
        key = field.metadata.get("json", field.name)
        if key is not None:
            yield key, hints[field.name], comments.get(field.name, "")


def nested_dataclasses(hint: Any) -> list[type]:
    """Return the dataclasses in an annotation."""
    if dataclasses.is_dataclass(hint) and hint is not Unavailable:
        return [typing.cast("type", hint)]
    return [nested for argument in typing.get_args(hint) for nested in nested_dataclasses(argument)]


def json_type(hint: Any) -> str:
    """Return the description of the JSON form of a type: "array of numbers"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(sorted(dict.fromkeys(map(json_type, arguments)), key="null".__eq__))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is np.ndarray:
        return "array of numbers"
    if origin in (tuple, list):
        return f"array of {', '.join(json_type(item) for item in arguments if item is not ...)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"object of {json_type(arguments[1])}"
    if hint in (None, type(None), Unavailable):
        return "null"
    if dataclasses.is_dataclass(hint):
        name = typing.cast("type", hint).__name__
        return f"[{name}](#{name.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member.name.lower()}`" for member in hint)
    return JSON_TYPE_NAMES[hint]


# --- Python ----------------------------------------------------------------------------------------


def python_page() -> str:
    public_objects = [getattr(cudakit, name) for name in cudakit.__all__]
    functions = filter(inspect.isfunction, public_objects)
    classes = [
        class_
        for class_ in public_objects
        if inspect.isclass(class_) and (not issubclass(class_, Exception))
    ]
    modules = filter(inspect.ismodule, public_objects)
    return sections(
        f"# Python\n\n{PYTHON_INTRO}",
        table(("Command", "Python"), PYTHON_CALLS),
        *map(function_section, functions),
        *map(class_section, classes),
        *map(module_section, modules),
    )


def module_section(module: types.ModuleType) -> str:
    """Return the section of a public module: its docstring and its functions."""
    name = module.__name__.rpartition(".")[2]
    functions = [
        function
        for function in vars(module).values()
        if inspect.isfunction(function) and function.__module__ == module.__name__
    ]
    return sections(
        f"## cudakit.{name}",
        *paragraphs(module.__doc__ or ""),
        *(function_section(function, prefix=f"{name}.") for function in functions),
    )


def function_section(function: types.FunctionType, *, prefix: str = "") -> str:
    source = inspect.getsource(function)
    definition = typing.cast("ast.FunctionDef", ast.parse(source).body[0])
    signature = "".join(source.splitlines(keepends=True)[: definition.body[0].lineno - 1])
    return sections(
        f"##{'#' * bool(prefix)} cudakit.{prefix}{function.__name__}",
        f"```\n{signature.rstrip().removesuffix(':')}\n```",
        *paragraphs(function.__doc__ or ""),
    )


def class_section(class_: type) -> str:
    """Return the section of a class: its constructor, docstring and members."""
    constructor = getattr(class_, "__init__")  # noqa: B009 not on an instance: mypy rejects class_.__init__
    rows = [
        (f"`{name}{signature}`", comment) for name, signature, comment in public_members(class_)
    ]
    return sections(
        f"## cudakit.{class_.__name__}",
        f"```\n{class_.__name__}{parameters(constructor)}\n```",
        *paragraphs(class_.__doc__ or ""),
        table(("Member", "What it does"), rows),
    )


def public_members(class_: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the parameters and the first line of each documented member; inherited members last."""
    hints = typing.get_type_hints(class_)
    if dataclasses.is_dataclass(class_):
        comments = field_comments(class_)
        yield from ((name, "", comments[name]) for name in hints)
    else:
        for name, hint in hints.items():
            if not name.startswith("_") and first_line(hint):
                yield name, parameters(hint.__call__), first_line(hint)
    listed_names = set(hints)
    for base in class_.__mro__:
        for name, member in vars(base).items():
            if (
                name.startswith("_")
                or name in listed_names
                or not base.__module__.startswith("cudakit")
            ):
                continue
            listed_names.add(name)
            if isinstance(member, bool):
                yield name, "", parse_field_comments(inspect.getsource(base))[name]
            elif first_line(member):
                method_types = types.FunctionType | types.MethodDescriptorType
                method = member.__func__ if isinstance(member, classmethod) else member
                is_method = isinstance(method, method_types)
                yield name, parameters(method) if is_method else "", first_line(member)


def parameters(function: Any) -> str:
    """Return the parameters of a method, without ``self`` and without types."""
    signature = inspect.signature(function)
    untyped_parameters = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ][1:]
    return str(signature.replace(parameters=untyped_parameters, return_annotation=signature.empty))


def first_line(member: object) -> str:
    return plain(getattr(member, "__doc__", None) or "").partition("\n")[0]


# --- comments and Markdown ----------------------------------------------------------------------------


def field_comments(owner: type) -> dict[str, str]:
    """Return the comment after each field of a class and its base classes, or else the comment above it."""
    comments: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("cudakit"):
            comments |= parse_field_comments(textwrap.dedent(inspect.getsource(base)))
    return comments


def parse_field_comments(source: str) -> dict[str, str]:
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    comments_by_name, last_line = {}, 0
    for node in typing.cast("ast.ClassDef", ast.parse(source).body[0]).body:
        comment_above = " ".join(
            comments[line] for line in range(last_line + 1, node.lineno) if line in comments
        )
        last_line = node.end_lineno or node.lineno
        # A long type or default is in parentheses, with the comment on one of the lines in them.
        comment_within = " ".join(
            comments[line] for line in range(node.lineno, last_line + 1) if line in comments
        )
        for target in assigned_names(node):
            comments_by_name[target] = plain(comment_within or comment_above)
    return comments_by_name


def assigned_names(node: ast.stmt) -> list[str]:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
    return []


def plain(text: str) -> str:
    return inspect.cleandoc(text).replace("``", "`")


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text in Markdown; examples become code blocks."""
    return [paragraph(text) for text in inspect.cleandoc(text).split("\n\n")]


def paragraph(text: str) -> str:
    if text.startswith("\b\n"):
        return f"```\n{text[2:]}\n```"
    return f"```pycon\n{text}\n```" if text.startswith(">>>") else plain(text)


def sections(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


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
