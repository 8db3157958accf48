"""Short forms of the names of kernels, for tables and sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MAX_KERNEL_NAME_LENGTH = 80

# Levels of detail of a shortened name, the most detailed level first. A level consists of the depth to which
# template arguments are shown, the number of argument types per depth, and whether namespaces are shown.
_DETAIL_LEVELS = (
    (9, 99, True),
    (2, 1, True),
    (2, 1, False),
    (1, 1, True),
    (0, 0, True),
    (0, 0, False),
)

_OPENING, _CLOSING = "<({[", ">)}]"
_OPERATOR = re.compile(r"\boperator\s*(?:\(\)|\[\]|->\*?|<=>|<<=?|>>=?|[<>]=?)\s?")
_ABI_TAG = re.compile(r"\[abi:[^\]]*\]")
_NUMBER = re.compile(r"(-?\d+)u?l{0,2}")
_CAST = re.compile(r"\([^()]*\)(?=\w)")  # the cast in an enumerator such as (Mode)2
_AFTER_PARAMETERS = re.compile(r"\)( const| \[clone [^\]]*\])*$")


def short_kernels(names: Iterable[str]) -> dict[str, str]:
    """Return the short name of each kernel; equal ones of different kernels are numbered: ``add<…> #2``."""
    short_names: dict[str, str] = {}
    counts = Counter[str]()
    for name in dict.fromkeys(names):
        short_names[name] = short_name = short_kernel(name)
        counts[short_name] += 1
    numbers = Counter[str]()
    for name, short_name in short_names.items():
        if counts[short_name] > 1:
            numbers[short_name] += 1
            short_names[name] = f"{short_name} #{numbers[short_name]}"
    return short_names


def short_kernel(name: str, *, max_length: int = MAX_KERNEL_NAME_LENGTH) -> str:
    """Shorten a demangled kernel name: ``at::native::vectorized_kernel<4, add<float>, …>``.

    Drops the parameters, the namespaces of template arguments, and template arguments until the name fits.
    A lambda or local type is replaced by the function that contains it.
    """
    kernel_name = _OPERATOR.sub("operator", _ABI_TAG.sub("", name))
    if not _is_balanced(kernel_name):
        return cut(kernel_name, max_length)
    *enclosing_scopes, last_scope = _scopes(_without_signature(kernel_name))
    for max_depth, max_types, is_qualified in _DETAIL_LEVELS:
        short_name = "::".join(
            (
                *(enclosing_scopes if is_qualified else ()),
                _shorten_template(last_scope, max_depth, max_types),
            )
        )
        if len(short_name) <= max_length:
            return short_name
    return cut(short_name, max_length)


def cut(text: str, max_length: int) -> str:
    """Cut the middle out of a text that is too long, because kernel names differ at both ends."""
    if len(text) <= max_length:
        return text
    head_length = (max_length - 1) // 2
    return f"{text[:head_length]}…{text[len(text) - (max_length - 1 - head_length) :]}"


def _without_signature(kernel_name: str) -> str:
    """Remove the result type and the parameters: ``void f<int>(int)`` becomes ``f<int>``."""
    if _AFTER_PARAMETERS.search(kernel_name):
        kernel_name = kernel_name[: _positions_outside_brackets(kernel_name, "(")[-1]]
    return kernel_name[max(_positions_outside_brackets(kernel_name, " "), default=-1) + 1 :]


def _scopes(text: str) -> list[str]:
    """Split a qualified name, and remove the template arguments of all scopes but the last."""
    *enclosing_scopes, last_scope = _split_outside_brackets(text, "::")
    names = (scope.partition("<")[0] for scope in enclosing_scopes if not scope.startswith("("))
    return [*names, last_scope]


def _shorten_template(text: str, max_depth: int, max_types: int) -> str:
    """Return a name with its template arguments, of which at most ``max_types`` are types."""
    name, opening_bracket, after_name = text.partition("<")
    if not opening_bracket or ">" not in after_name:
        return text
    arguments_text, _, after_arguments = after_name.rpartition(">")
    if max_depth == 0:
        return f"{name}<…>{after_arguments}"
    arguments = [argument.strip() for argument in _split_outside_brackets(arguments_text, ",")]
    type_indices = [
        index for index, argument in enumerate(arguments) if not _NUMBER.fullmatch(argument)
    ]
    shown_end = type_indices[max_types] if len(type_indices) > max_types else len(arguments)
    shown_arguments = [
        _shorten_argument(argument, max_depth - 1, max_types) for argument in arguments[:shown_end]
    ]
    ellipsis = ["…"] if shown_end < len(arguments) else []
    return f"{name}<{', '.join(shown_arguments + ellipsis)}>{after_arguments}"


def _shorten_argument(text: str, max_depth: int, max_types: int) -> str:
    """Return a template argument without namespaces."""
    if number_match := _NUMBER.fullmatch(text):
        return number_match[1]
    scopes = _split_outside_brackets(_CAST.sub("", text), "::")
    local_scope = next((scope for scope in scopes if _is_function(scope)), None)
    if local_scope is None:
        return _shorten_template(scopes[-1], max_depth, max_types)
    return _shorten_template(_without_signature(local_scope), max_depth, max_types)


def _is_function(scope: str) -> bool:
    return not scope.startswith(("(", "{")) and bool(_AFTER_PARAMETERS.search(scope))


def _split_outside_brackets(text: str, separator: str) -> list[str]:
    part_ends = [*_positions_outside_brackets(text, separator), len(text)]
    part_begins = [0, *(end + len(separator) for end in part_ends[:-1])]
    return [text[begin:end] for begin, end in zip(part_begins, part_ends, strict=True)]


def _positions_outside_brackets(text: str, substring: str) -> list[int]:
    """Return the positions at which a text contains ``substring`` outside all brackets."""
    depth, positions = 0, []
    for index, character in enumerate(text):
        if depth == 0 and text.startswith(substring, index):
            positions.append(index)
        depth += (character in _OPENING) - (character in _CLOSING)
    return positions


def _is_balanced(text: str) -> bool:
    open_brackets: list[str] = []
    for character in text:
        if character in _OPENING:
            open_brackets.append(character)
        elif character in _CLOSING and (
            not open_brackets or _OPENING.index(open_brackets.pop()) != _CLOSING.index(character)
        ):
            return False
    return not open_brackets
