"""Write interactive views into an HTML page: their data, and the scripts that draw them.

The data are arrays as text: byte planes, compressed by deflate, in base64. ``assets/arrays.js`` reads them.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.report.document import Array, Explorer
from cudakit.report.escape import Markup, element

# The default level of zlib: level 9 takes several times as long for 1 % fewer bytes.
_COMPRESSION_LEVEL = 6
_ARRAY_TYPES = {"u1": np.uint8, "i4": np.int32, "u4": np.uint32, "u8": np.uint64, "i8": np.int64}

_IMPORT_PATTERN = re.compile(r'^import (\{[^}]*\}) from "\./([a-z_]+)\.js";$', re.MULTILINE)
_EXPORT_PATTERN = re.compile(r"^export ((?:async )?function\*?|class|const) (\w+)", re.MULTILINE)


def explorer(node: Explorer) -> Markup:
    """Return the HTML element that the script ``KIND.js`` fills. The element contains all data as text."""
    explorer_data = node.data()
    descriptions, packed_text = pack(explorer_data.arrays)
    facts = json.dumps({"arrays": descriptions, "facts": explorer_data.facts}, ensure_ascii=True)
    # The text "</script" would end the element. JSON allows "\u003c" instead of "<".
    facts = facts.replace("<", "\\u003c")
    return element(
        "div",
        element(
            "div",
            element("p", "Loading the interactive views.", class_="muted"),
            class_="explorer-views",
        ),
        element(
            "noscript",
            element("p", "The interactive views need JavaScript; the tables below do not."),
        ),
        element("script", Markup(facts), type="application/json", class_="explorer-facts"),
        element("script", Markup(packed_text), type="text/plain", class_="explorer-data"),
        class_="explorer",
        data_kind=node.kind,
    )


def pack(arrays: Mapping[str, Array]) -> tuple[list[dict[str, Any]], str]:
    """Return the description of each array, and all arrays as one base64 text.

    An array of integers is stored as integers of 1, 4 or 8 bytes. If its values never decrease, their
    differences are stored instead. The bytes of one significance are stored together (byte planes), because
    deflate finds more repetitions in them than in whole numbers. The script reads numbers of 8 bytes as
    floating-point numbers, which are exact below 2**53.
    """
    descriptions, planes = [], []
    for name, array in arrays.items():
        values = np.asarray(array)
        is_sum = False
        if values.dtype != np.uint8 and len(values) >= 2:
            differences = np.diff(values.astype(np.int64), prepend=0)
            if differences[1:].min() >= 0:
                values, is_sum = differences, True
        type_name = _smallest_type(values)
        descriptions.append({"name": name, "type": type_name, "length": len(values), "sum": is_sum})
        packed = values.astype(np.dtype(_ARRAY_TYPES[type_name]).newbyteorder("<"))
        planes.append(packed.view(np.uint8).reshape(len(values), packed.itemsize).T.tobytes())
    data = zlib.compress(b"".join(planes), _COMPRESSION_LEVEL)
    return descriptions, b64encode(data).decode("ascii")


def _smallest_type(values: npt.NDArray[Any]) -> str:
    """Return the name in ``_ARRAY_TYPES`` of the smallest type that holds all values."""
    if values.dtype in (np.uint8, np.bool_):
        return "u1"
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0:
        return "i4" if low >= -(1 << 31) and high < 1 << 31 else "i8"
    return "u4" if high < 1 << 32 else "u8"


@cache
def joined_script(name: str, package: str) -> str:
    """Return a module and all modules that it imports as one script, imported modules first.

    Modules are in the folder ``assets`` of the package, or of ``cudakit.report`` if all pages share them.

    A browser loads no modules into a page from a disk, so each module becomes a function that returns the
    exported names. A module may import names, and export functions, classes and constants.
    """
    source_by_module: dict[str, str] = {}
    _collect_modules(name, package, source_by_module)
    # In a JavaScript block, the names of a script do not collide with those of the other scripts of a page.
    return '"use strict";\n{\n' + "".join(source_by_module.values()) + "}\n"


def _collect_modules(name: str, package: str, source_by_module: dict[str, str]) -> None:
    """Add a module and the modules that it imports to ``source_by_module``, as JavaScript functions."""
    if name in source_by_module:
        return
    script_file = files("cudakit.report").joinpath(f"assets/{name}.js")
    if not script_file.is_file():
        script_file = files(package).joinpath(f"assets/{name}.js")
    script_text = script_file.read_text(encoding="utf-8")
    for _, imported_name in _IMPORT_PATTERN.findall(script_text):
        _collect_modules(imported_name, package, source_by_module)
    exported_names = ", ".join(match[1] for match in _EXPORT_PATTERN.findall(script_text))
    module_body = _EXPORT_PATTERN.sub(
        r"\1 \2", _IMPORT_PATTERN.sub(r"const \1 = module_\2;", script_text)
    )
    source_by_module[name] = (
        f"const module_{name} = (() => {{\n{module_body}return {{ {exported_names} }};\n}})();\n"
    )
