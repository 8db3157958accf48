"""Describe dataclasses, functions and classes in Markdown, from annotations, docstrings and comments."""

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
    return typing.cast(type, getattr(import_module(module), attribute))


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
        return [typing.cast(type, hint)]
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
    return simple_json_type(hint)


def simple_json_type(hint: Any) -> str:
    if hint in (None, type(None), Unavailable):
        return "null"
    if dataclasses.is_dataclass(hint):
        name = typing.cast(type, hint).__name__
        return f"[{name}](#{name.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{member.name.lower()}`" for member in hint)
    return JSON_TYPE_NAMES[hint]


# --- Python ----------------------------------------------------------------------------------------


def python_page() -> str:
    public_objects = [getattr(cudakit, name) for name in cudakit.__all__]
    functions = filter(inspect.isfunction, public_objects)
    classes = [
        class_ for class_ in public_objects if inspect.isclass(class_) and is_not_error(class_)
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
    definition = typing.cast(ast.FunctionDef, ast.parse(source).body[0])
    signature = "".join(source.splitlines(keepends=True)[: definition.body[0].lineno - 1])
    return sections(
        f"##{'#' * bool(prefix)} cudakit.{prefix}{function.__name__}",
        f"```\n{signature.rstrip().removesuffix(':')}\n```",
        *paragraphs(function.__doc__ or ""),
    )


def is_not_error(class_: type) -> bool:
    return not issubclass(class_, Exception)


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
    for node in typing.cast(ast.ClassDef, ast.parse(source).body[0]).body:
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
