"""Describe dataclasses, functions and classes in Markdown: annotations, docstrings and comments."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from typing import Any

import numpy as np

import cudakit
from cudakit.units import Unavailable

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

WORDS = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    Any: "any value",
    object: "any value",
}


# --- results ---------------------------------------------------------------------------------------


def result_page(line: str, home: str) -> str:
    result = result_class(home)
    does = "writes" if " -o " in line else "prints"
    intro = (
        f"The JSON document that `cudakit {line}` {does}. Its `schema` is `{schema_of(result)}`. "
        "Values that are not available are null."
    )
    return sections(f"# cudakit {line}\n\n{intro}", *map(record_section, records(result)))


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
    """Return a dataclass and all dataclasses in its fields, breadth first."""
    types: list[type] = []
    waiting = [result]
    while waiting:
        current = waiting.pop(0)
        if current not in types:
            types.append(current)
            waiting += [
                part for _, hint, _ in members(current) for part in nested_dataclasses(hint)
            ]
    return types


def record_section(current: type) -> str:
    rows = [(f"`{key}`", json_type(hint), note) for key, hint, note in members(current)]
    return sections(
        f"## {current.__name__}",
        plain(inspect.getdoc(current) or ""),
        table(("Field", "Type", "Meaning"), rows),
    )


def members(current: type) -> Iterator[tuple[str, Any, str]]:
    """Yield each JSON key of a dataclass with its type and its comment."""
    hints, comments = typing.get_type_hints(current), field_comments(current)
    for field in dataclasses.fields(current):
        key = field.metadata.get("json", field.name)
        if key is not None:
            yield key, hints[field.name], comments.get(field.name, "")


def nested_dataclasses(hint: Any) -> list[type]:
    """Return the dataclasses in an annotation."""
    if dataclasses.is_dataclass(hint) and hint is not Unavailable:
        return [typing.cast(type, hint)]
    return [part for inner in typing.get_args(hint) for part in nested_dataclasses(inner)]


def json_type(hint: Any) -> str:
    """Return the words for the JSON form of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(sorted(dict.fromkeys(map(json_type, inner)), key="null".__eq__))
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is np.ndarray:
        return "array of numbers"
    if origin in (tuple, list):
        return f"array of {', '.join(json_type(item) for item in inner if item is not ...)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"object of {json_type(inner[1])}"
    return simple_json_type(hint)


def simple_json_type(hint: Any) -> str:
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
    classes = [class_ for class_ in public if inspect.isclass(class_) and is_not_error(class_)]
    modules = filter(inspect.ismodule, public)
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
        *(function_section(function, within=f"{name}.") for function in functions),
    )


def function_section(function: types.FunctionType, *, within: str = "") -> str:
    source = inspect.getsource(function)
    definition = typing.cast(ast.FunctionDef, ast.parse(source).body[0])
    head = "".join(source.splitlines(keepends=True)[: definition.body[0].lineno - 1])
    return sections(
        f"##{'#' * bool(within)} cudakit.{within}{function.__name__}",
        f"```\n{head.rstrip().removesuffix(':')}\n```",
        *paragraphs(function.__doc__ or ""),
    )


def is_not_error(class_: type) -> bool:
    return not issubclass(class_, Exception)


def class_section(class_: type) -> str:
    """Return the section of a class: its constructor, docstring and members."""
    made = getattr(class_, "__init__")  # noqa: B009  of the class, whatever its subclasses have
    rows = [(f"`{name}{form}`", comment) for name, form, comment in public_members(class_)]
    return sections(
        f"## cudakit.{class_.__name__}",
        f"```\n{class_.__name__}{parameters(made)}\n```",
        *paragraphs(class_.__doc__ or ""),
        table(("Member", "What it does"), rows),
    )


def public_members(class_: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, parameters and first line of each documented member; inherited members last."""
    called = typing.get_type_hints(class_)
    if dataclasses.is_dataclass(class_):
        comments = field_comments(class_)
        yield from ((name, "", comments[name]) for name in called)
    else:
        for name, hint in called.items():
            if not name.startswith("_") and first_line(hint):
                yield name, parameters(hint.__call__), first_line(hint)
    seen = set(called)
    for base in class_.__mro__:
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
    """Return the parameters of a method, without ``self`` and without types."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()
    ][1:]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def first_line(member: object) -> str:
    return plain(getattr(member, "__doc__", None) or "").partition("\n")[0]


# --- comments and Markdown ----------------------------------------------------------------------------


def field_comments(owner: type) -> dict[str, str]:
    """Return the comment after each field or member of a class, or else the one above it."""
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
    by_name, last = {}, 0
    for node in typing.cast(ast.ClassDef, ast.parse(source).body[0]).body:
        above = " ".join(
            comments[line] for line in range(last + 1, node.lineno) if line in comments
        )
        last = node.end_lineno or node.lineno
        for target in targets(node):
            by_name[target] = plain(comments.get(last, above))
    return by_name


def targets(node: ast.stmt) -> list[str]:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
    return []


def plain(text: str) -> str:
    return inspect.cleandoc(text).replace("``", "`")


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text; examples are code blocks."""
    return [paragraph(part) for part in inspect.cleandoc(text).split("\n\n")]


def paragraph(text: str) -> str:
    if text.startswith("\b\n"):
        return f"```\n{text[2:]}\n```"
    return f"```pycon\n{text}\n```" if text.startswith(">>>") else plain(text)


def sections(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
