"""The scripts of a page: the modules among the assets, joined into one text."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([a-z_]+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function\*?|class|const) (\w+)", re.MULTILINE)


@cache
def joined(name: str) -> str:
    """Return a module and all modules that it imports as one script, imported modules first.

    A page from a disk cannot load modules, so each becomes a function that returns what the module exports.
    A module may import names from modules beside it, and export functions, classes and constants.
    """
    modules: dict[str, str] = {}
    _collect(name, modules)
    return '"use strict";\n' + "".join(modules.values())


def _collect(name: str, modules: dict[str, str]) -> None:
    if name in modules:
        return
    text = files("cudakit.render").joinpath(f"assets/{name}.js").read_text(encoding="utf-8")
    for _, imported in _IMPORT.findall(text):
        _collect(imported, modules)
    exported = ", ".join(match[1] for match in _EXPORT.findall(text))
    body = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = module_\2;", text))
    modules[name] = f"const module_{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"
