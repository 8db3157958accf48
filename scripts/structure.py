"""Print the size and the import structure of the package.

    python scripts/structure.py [--check]

Lines and files by package, the deepest import level (the longest chain of imports that starts at a file),
import cycles, files under 40 lines that one other file imports, and the largest classes, files and functions.
Imports inside functions and for type checkers count. A unit of C, which is a .c file with the header of its
name, needs the units whose headers it includes and whose functions and variables it uses. ``--check`` exits
with 1 if there is a cycle in either language.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL_LINES = 40
ROWS = 5
NATIVE = {".c", ".h", ".cu"}

_C_COMMENT_OR_STRING = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_C_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# A name that is not the member of a struct.
_C_NAME = re.compile(r"(?<![.>\w])[A-Za-z_]\w*")
# The names of functions and variables that are defined at the beginning of a line, and not static.
_C_DEFINITION = re.compile(
    r"^(?!static|typedef|extern|return)\w[\w ]*[ *](\w+)(?:\([^;{}]*\)\s*\{| = [^;]*;|;)",
    re.MULTILINE,
)


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    paths = {}
    for path in sorted((ROOT / "cudakit").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imports(tree: ast.AST, package_modules: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports, including imports inside functions."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = names & package_modules.keys()
            imported |= submodules
            if submodules != names:
                imported.add(node.module)
    return imported & package_modules.keys()


def import_graph(package_modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return the other modules of the package that each module imports."""
    return {
        name: imports(ast.parse(path.read_text(encoding="utf-8")), package_modules) - {name}
        for name, path in package_modules.items()
    }


def import_cycles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the groups of modules that import one another."""
    return [component for component in strongly_connected(graph) if len(component) > 1]


def c_graph() -> dict[str, set[str]]:
    """Return the other units that each unit of C of the package needs, each by its path without suffix."""
    package = ROOT / "cudakit"
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*"))
        if path.suffix in {".c", ".h"}
    }
    unit_of = {path: str(path.relative_to(package).with_suffix("")) for path in texts}
    words = {
        path: set(_C_NAME.findall(_C_COMMENT_OR_STRING.sub(" ", text)))
        for path, text in texts.items()
    }
    headers = {
        path: {
            header
            for name in _C_INCLUDE.findall(text)
            for header in _found_headers(path, name, texts)
        }
        for path, text in texts.items()
    }
    definitions: dict[str, set[Path]] = defaultdict(set)
    for path, text in texts.items():
        if path.suffix == ".c":
            for name in _C_DEFINITION.findall(_C_COMMENT_OR_STRING.sub(" ", text)):
                definitions[name].add(path)
    graph: dict[str, set[str]] = {unit: set() for unit in unit_of.values()}
    for path in texts:
        graph[unit_of[path]] |= {unit_of[header] for header in headers[path]}
        included = set(headers[path])
        while more := {header for each in included for header in headers[each]} - included:
            included |= more
        declared = {name for header in included for name in words[header]}
        if path.suffix == ".c":
            for name in words[path] & declared & definitions.keys():
                graph[unit_of[path]] |= {
                    unit_of[other]
                    for other in definitions[name]
                    if package_of(other) == package_of(path)
                }
    return {unit: needed - {unit} for unit, needed in graph.items()}


def _found_headers(path: Path, name: str, files: Iterable[Path]) -> list[Path]:
    """Return the headers that ``#include "name"`` in a file may mean: of its folder, else of its package."""
    beside = path.parent / name
    if beside in files:
        return [beside]
    parts = Path(name).parts
    return [
        header
        for header in files
        if header.parts[-len(parts) :] == parts and package_of(header) == package_of(path)
    ]


def small_files(package_modules: dict[str, Path], graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of fewer than ``SMALL_LINES`` lines that only one other module imports."""
    importers = Counter(name for imported_names in graph.values() for name in imported_names)
    return [
        name
        for name, path in package_modules.items()
        if path.stem not in {"__init__", "__main__"}
        and path.read_text(encoding="utf-8").count("\n") < SMALL_LINES
        and importers[name] == 1
    ]


def strongly_connected(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the strongly connected components; imported components come first (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[tuple[str, ...]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for imported in sorted(graph[name]):
            if imported not in order:
                visit(imported)
            if imported in stack:
                low[name] = min(low[name], low[imported])
        if low[name] == order[name]:
            start = stack.index(name)
            components.append(tuple(sorted(stack[start:])))
            del stack[start:]

    for name in graph:
        if name not in order:
            visit(name)
    return components


def levels(graph: dict[str, set[str]], components: list[tuple[str, ...]]) -> dict[str, int]:
    """Return the length of the longest chain of imports from each module; a cycle counts as one module."""
    component_of = {name: component for component in components for name in component}

    @cache
    def level(component: tuple[str, ...]) -> int:
        imported_components = {
            component_of[imported] for name in component for imported in graph[name]
        } - {component}
        return 1 + max(map(level, imported_components), default=0)

    return {name: level(component_of[name]) for name in graph}


def package_of(path: Path) -> str:
    """Return the package in which a file is counted: one level."""
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[:2])


def print_sizes() -> None:
    """Print a row for each package: the number of Python files, the lines of Python, the lines of C."""
    files: Counter[str] = Counter()
    lines: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted((ROOT / "cudakit").rglob("*")):
        kind = "native" if path.suffix in NATIVE else "python" if path.suffix == ".py" else ""
        if kind:
            files[package_of(path)] += kind == "python"
            lines[package_of(path)][kind] += path.read_text(encoding="utf-8").count("\n")
    print(f"{'package':28}{'files':>7}{'Python':>9}{'C':>8}")
    for package, count in sorted(files.items()):
        row = lines[package]
        print(f"{package:28}{count:7}{row['python']:9}{row['native'] or '':>8}")
    total = sum(lines.values(), Counter[str]())
    print(f"{'all':28}{files.total():7}{total['python']:9}{total['native']:8}")
    tests = list((ROOT / "tests").rglob("*.py"))
    count = sum(path.read_text(encoding="utf-8").count("\n") for path in tests)
    print(f"{'tests':28}{len(tests):7}{count:9}")


def lengths(
    trees: dict[str, ast.Module], *kinds: type[ast.ClassDef | ast.FunctionDef]
) -> list[tuple[int, str]]:
    """Return the length and the name of the longest classes or functions."""
    rows = []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                rows.append((length, f"{name}.{node.name}"))
    return sorted(rows, reverse=True)[:ROWS]


def main() -> int:
    package_modules = modules()
    texts = {name: path.read_text(encoding="utf-8") for name, path in package_modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    graph = import_graph(package_modules)
    cycles, small = import_cycles(graph), small_files(package_modules, graph)
    c_cycles = import_cycles(c_graph())
    depth = levels(graph, strongly_connected(graph))
    deepest = max(depth, key=lambda name: depth[name])
    print_sizes()
    print(f"\ndeepest import level: {depth[deepest]} ({deepest})")
    print(f"import cycles: {len(cycles)}", *(f"\n  {' '.join(cycle)}" for cycle in cycles))
    print(f"cycles of C files: {len(c_cycles)}", *(f"\n  {' '.join(cycle)}" for cycle in c_cycles))
    print(f"files under {SMALL_LINES} lines with one importer: {len(small)}")
    print(*(f"  {name}\n" for name in small), sep="", end="")
    sizes = sorted(((text.count("\n"), name) for name, text in texts.items()), reverse=True)[:ROWS]
    functions = lengths(trees, ast.FunctionDef)
    for title, rows in (
        ("classes", lengths(trees, ast.ClassDef)),
        ("files", sizes),
        ("functions", functions),
    ):
        print(f"largest {title}: " + ", ".join(f"{name} {length}" for length, name in rows))
    return int("--check" in sys.argv[1:] and bool(cycles or c_cycles))


if __name__ == "__main__":
    sys.exit(main())
