"""The import table of CONTRIBUTING.md, enforced on every file of the package."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import structure

import cudakit

ANYTHING = frozenset({""})

# Any feature may import these, but no other feature and none of the writers of reports.
FEATURE = {
    "torch_rules",
    "gpu.api",
    "arrays",
    "trace",
    "report.axis",
    "report.document",
    "report.picture",
    "report.timeline",
    "stacks",
    "serialize",
    "units",
    "errors",
    "input_files",
}
FEATURES = {"allocator", "bench", "devices", "memory", "profile", "sanitize"}

# A package, and what of ours it may import besides itself. A file belongs to the longest name that fits.
PACKAGES = {
    "units": frozenset(),
    "errors": frozenset(),
    "torch_rules": {"units", "errors"},
    "input_files": {"units", "errors"},
    "serialize": {"units"},
    "stacks": {"units", "errors"},
    "report": {"stacks", "serialize", "units", "errors"},
    "trace": {"stacks", "units", "errors", "input_files"},
    "gpu": {"trace", "stacks", "serialize", "units", "errors"},
    "record": {"gpu", "trace", "stacks", "units", "errors"},
    "record.agent": frozenset(),
    "arrays": {"gpu", "errors"},
    "arrays.plugs": {"arrays", "gpu", "errors"},
    **dict.fromkeys(FEATURES, FEATURE),
    "api": {
        *FEATURES,
        "arrays",
        "gpu",
        "record",
        "trace",
        "report.document",
        "torch_rules",
        "errors",
    },
    "pytest_plugin": {
        *FEATURES,
        "api",
        "gpu",
        "record",
        "trace",
        "report.document",
        "torch_rules",
        "units",
        "errors",
    },
    "cli": ANYTHING,
    "__init__": {"api", "arrays", "gpu", "errors"},
    "__main__": {"cli"},
}

# pytest imports its plugins always: they import the rest of us inside functions, or for types, only.
LAZY_PACKAGES = {"pytest_plugin"}

# A module outside of the standard library, and the packages that may import it.
THIRD_PARTY = {
    "backports": {"memory"},  # zstd before Python 3.14
    "click": {"cli"},
    "compression": {"memory"},  # the same, of the standard library since then
    "numpy": {
        *FEATURES,
        "torch_rules",
        "report",
        "serialize",
        "trace",
        "gpu",
        "arrays",
        "record",
        "api",
        "cli",
    },
    "pytest": {"pytest_plugin"},
    "ray": {"bench"},
    "rich": {"report"},
    # The hardware layer.
    "cuda": {"gpu", "arrays.plugs", "record"},
    "cupti": {"gpu", "arrays.plugs", "record"},
    "cupy": {"gpu", "arrays.plugs", "record"},
    "nccl": {"gpu"},
    "numba": {"gpu", "arrays.plugs", "record"},
    "nvmath": {"gpu"},
    "nvtx": {"gpu"},
    "pynvml": {"gpu"},
    "rmm": {"gpu", "arrays.plugs", "record"},
    "torch": {"gpu", "arrays.plugs", "record"},
}

# Of the standard library, what loads a vendor's library and what writes to the user.
RESTRICTED = {
    "ctypes": {"gpu", "arrays.plugs", "record"},
    "print": {"cli"},
    "sys.exit": {"cli", "__main__"},
    "sys.stdout": {"cli"},
    "sys.stderr": {"cli", "record.agent"},
}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, spelled in every way the table may know it, the shortest first."""

    spellings: tuple[str, ...]
    line: int
    lazy: bool = False

    @property
    def top(self) -> str:
        return self.spellings[0].split(".")[0]


def violations(name: str, source: str) -> list[str]:
    """List what a module of the package, named without ``cudakit.``, must not do."""
    tree = parsed(source)
    package = package_of(name)
    if package is None:
        return [f"{name}: is in no row of the table"]
    found = [_forbidden_import(package, imported) for imported in _imports(tree)]
    found += [_forbidden_use(package, use, line) for use, line in _uses(tree)]
    return [f"{name}:{reason}" for reason in found if reason]


@cache
def parsed(source: str) -> ast.Module:
    """Parse a module once for all tests."""
    return ast.parse(source)


def package_of(name: str) -> str | None:
    return max((package for package in PACKAGES if _within(name, {package})), key=len, default=None)


def _within(name: str, places: frozenset[str] | set[str]) -> bool:
    return any(not place or name == place or name.startswith(f"{place}.") for place in places)


def _forbidden_import(package: str, imported: Import) -> str:
    if imported.top == ".":
        return f"{imported.line}: relative import"
    if imported.top == "cudakit":
        return _forbidden_package(package, imported)
    if imported.top in sys.stdlib_module_names:
        return _forbidden_use(package, imported.top, imported.line)
    if imported.top not in THIRD_PARTY:
        return f"{imported.line}: {imported.top} is in no row of the table"
    if not _within(package, THIRD_PARTY[imported.top]):
        return f"{imported.line}: {package} must not import {imported.top}"
    return ""


def _forbidden_package(package: str, imported: Import) -> str:
    ours = [spelling.partition(".")[2] for spelling in imported.spellings]
    if not any(spelling and _within(spelling, {package, *PACKAGES[package]}) for spelling in ours):
        return f"{imported.line}: {package} must not import {imported.spellings[-1]}"
    own = any(_within(spelling, {package, "errors"}) for spelling in ours)
    if package in LAZY_PACKAGES and not imported.lazy and not own:
        return f"{imported.line}: {package} must import {ours[-1]} inside a function"
    return ""


def _forbidden_use(package: str, use: str, line: int) -> str:
    if use in RESTRICTED and not _within(package, RESTRICTED[use]):
        return f"{line}: {package} must not use {use}"
    return ""


def _imports(tree: ast.Module) -> Iterator[Import]:
    lazy = {id(inner) for outer in ast.walk(tree) if _waits(outer) for inner in ast.walk(outer)}
    for node in ast.walk(tree):
        for spellings in _spellings(node):
            yield Import(spellings, node.lineno, id(node) in lazy)


def _waits(node: ast.AST) -> bool:
    """Return whether the code in a statement does not run at import."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _spellings(node: ast.AST) -> Iterator[tuple[str, ...]]:
    match node:
        case ast.Import(names=names):
            yield from ((alias.name,) for alias in names)
        case ast.ImportFrom(level=level) if level:
            yield (".",)
        case ast.ImportFrom(module=str(module), names=names):
            yield from ((module, f"{module}.{alias.name}") for alias in names)
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            yield (module,)


def _uses(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="print"):
                yield "print", node.lineno
            case ast.Attribute(value=ast.Name(id="sys"), attr=attribute):
                yield f"sys.{attribute}", node.lineno


SOURCE = Path(str(cudakit.__file__)).parent


def _module_name(place: Path) -> str:
    parts = place.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {_module_name(place): place for place in sorted(SOURCE.rglob("*.py"))}


def test_modules_import_only_what_their_packages_may() -> None:
    assert [
        reason
        for name, place in MODULES.items()
        for reason in violations(name, place.read_text(encoding="utf-8"))
    ] == []


def test_modules_of_the_package_are_found() -> None:
    assert {"errors", "report.document", "cli", "memory.snapshot", "__init__"} <= MODULES.keys()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("units", "from cudakit.errors import InputError"),
        ("trace", "from cudakit import report"),
        ("memory.load", "import cudakit.sanitize.engine"),
        ("memory.load", "from cudakit import bench"),
        ("memory.load", "from cudakit.report.json import render"),
        ("memory.load", "def f():\n    from cudakit.gpu.cuda import Cuda"),
        ("memory.load", "from cudakit.gpu import sim"),
        ("memory.load", "from cudakit import InputError"),
        ("memory.load", "from importlib import import_module\nimport_module('cudakit.cli')"),
        ("memory.load", "from . import tree"),
        ("memory.load", "import torch"),
        ("memory.load", "import rich.table"),
        ("memory.load", "import requests"),
        ("memory.load", "print(1)"),
        ("memory.load", "import sys\nsys.stdout.write('x')"),
        ("memory.load", "import click"),
        ("report.console", "from cudakit.memory.result import MemoryResult"),
        ("report.console", "import cuda.bindings.driver"),
        ("record.agent.start", "from cudakit.errors import CudakitError"),
        ("arrays.fill", "import ctypes"),
        ("pytest_plugin", "from cudakit.sanitize.findings import RaceCollector"),
        ("__init__", "import cudakit.memory"),
        ("helpers", ""),
    ],
)
def test_forbidden_module_is_reported(name: str, source: str) -> None:
    assert len(violations(name, source)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("memory.load", "from cudakit.memory import snapshot"),
        ("memory.load", "from cudakit.gpu import api"),
        ("memory.load", "from cudakit.gpu.api import Gpu\nimport numpy as np, json"),
        ("gpu.cuda", "import ctypes\nfrom cuda.bindings import driver"),
        ("report.html", "from cudakit.report.document import Document"),
        ("cli.run", "import cudakit.gpu.sim, cudakit.record.supervisor\nprint(1)"),
        ("record.supervise", "from cudakit.gpu import nvml"),
        ("api", "from cudakit.memory.load import load_snapshot"),
        ("pytest_plugin", "def f():\n    from cudakit.sanitize.findings import RaceCollector"),
        (
            "pytest_plugin",
            "if TYPE_CHECKING:\n    from cudakit.sanitize.findings import RaceCollector",
        ),
        ("api", "from cudakit.errors import InputError"),
    ],
)
def test_module_within_the_table_is_not_reported(name: str, source: str) -> None:
    assert violations(name, source) == []


def test_no_feature_may_know_another() -> None:
    assert not any(_within(allowed, FEATURES) for allowed in FEATURE)


GUIDE = Path(__file__).parent.parent / "CONTRIBUTING.md"
_ROW = re.compile(r"^\| (`[^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_the_import_table_for_contributors_is_the_one_enforced() -> None:
    shown: dict[str, frozenset[str]] = {}
    for packages, allowed in _ROW.findall(GUIDE.read_text(encoding="utf-8")):
        what = ANYTHING if allowed == "everything" else frozenset(re.findall(r"`(.+?)`", allowed))
        shown |= dict.fromkeys(re.findall(r"`(.+?)`", packages), what)

    assert shown == PACKAGES


# --- paths of the system ---------------------------------------------------------------------------

_SYSTEM_PATH = re.compile(r"/(?:(?:proc|sys)(?:/\S*)?|dev/(?:nvidia|nvhost|dxg|kmsg|shm)\S*)")
# A module outside of ``gpu`` that names such a path, and why it may.
PATH_EXCEPTIONS = {
    "record.agent.start": "imports the standard library only, and looks for CUDA among its own mappings",
    "devices.doctor.driver": "names device nodes, and what is absent, in reports",
}


def system_paths(source: str) -> list[str]:
    """List the string literals of a module that are paths of the kernel's files or device nodes."""
    texts = (
        node.value
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return [text for text in texts if _SYSTEM_PATH.fullmatch(text)]


def test_paths_of_the_system_are_known_to_the_hardware_layer_only() -> None:
    found = {
        name: paths
        for name, place in MODULES.items()
        if not _within(name, {"gpu", *PATH_EXCEPTIONS})
        and (paths := system_paths(place.read_text(encoding="utf-8")))
    }

    assert found == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("open('/proc/meminfo')", ["/proc/meminfo"]),
        ("Path(f'/proc/{pid}/stat')", ["/proc/"]),
        ("os.listdir('/sys/bus/pci')", ["/sys/bus/pci"]),
        ("os.open('/dev/nvidiactl', 2)", ["/dev/nvidiactl"]),
        ("print('see /proc/meminfo')\nopen('/dev/null')\nopen('/systems')", []),
    ],
)
def test_path_of_the_system_is_recognised_in_a_literal(source: str, found: list[str]) -> None:
    assert system_paths(source) == found


def test_exceptions_to_the_rule_on_paths_are_needed() -> None:
    used = {
        name for name in PATH_EXCEPTIONS if system_paths(MODULES[name].read_text(encoding="utf-8"))
    }

    assert used == PATH_EXCEPTIONS.keys()


# --- cycles and tiny files ------------------------------------------------------------------------


def test_import_graph_of_the_package_has_no_cycle() -> None:
    graph = structure.import_graph(structure.modules())

    assert structure.import_cycles(graph) == []


def test_graph_of_the_c_files_has_no_cycle() -> None:
    graph = structure.c_graph()

    assert "record/native/recorder/write/spool" in graph["record/native/recorder/recorder"]
    assert structure.import_cycles(graph) == []


@pytest.mark.parametrize(
    ("upper_code", "is_cycle"),
    [
        (
            "int lower(void);\nint upper(void)\n{\n    return lower();\n}\n",
            False,
        ),  # not declared by a header
        ('#include "lower.h"\nint upper(void)\n{\n    return lower();\n}\n', True),
        ('#include "api.h"\nint upper(void)\n{\n    return lower();\n}\n', True),
        ('#include "api.h"\nint upper(void)\n{\n    return 0; /* lower() */\n}\n', False),
    ],
)
def test_unit_of_c_needs_the_unit_whose_function_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upper_code: str, is_cycle: bool
) -> None:
    native = tmp_path / "cudakit/package/native"
    native.mkdir(parents=True)
    (native / "api.h").write_text("int lower(void);\nint upper(void);\n")
    (native / "lower.h").write_text("int lower(void);\n")
    (native / "upper.c").write_text(upper_code)
    (native / "lower.c").write_text(
        '#include "api.h"\n#include "lower.h"\nint lower(void)\n{\n    return upper();\n}\n'
    )
    monkeypatch.setattr(structure, "ROOT", tmp_path)

    cycles = structure.import_cycles(structure.c_graph())

    assert cycles == ([("package/native/lower", "package/native/upper")] if is_cycle else [])


def test_no_file_under_40_lines_has_a_single_importer() -> None:
    known = structure.modules()

    assert structure.small_files(known, structure.import_graph(known)) == []


def test_import_cycle_is_found_through_a_third_module() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}

    assert structure.import_cycles(graph) == [("a", "b", "c")]


def test_imports_within_functions_count_as_edges_of_the_import_graph(tmp_path: Path) -> None:
    known = {"a": tmp_path / "a.py", "b": tmp_path / "b.py"}
    known["a"].write_text("def f():\n    import b\n")
    known["b"].write_text("x = 1\n" * structure.SMALL_LINES)

    assert structure.import_graph(known) == {"a": {"b"}, "b": set()}


def test_small_file_is_reported_only_if_it_has_one_importer(tmp_path: Path) -> None:
    known = {name: tmp_path / f"{name}.py" for name in ("small", "shared", "large", "user")}
    for name, path in known.items():
        path.write_text("x = 1\n" * (structure.SMALL_LINES - (name != "large")))
    graph = {
        "small": set(),
        "shared": set(),
        "large": {"shared"},
        "user": {"small", "shared", "large"},
    }

    assert structure.small_files(known, graph) == ["small"]
