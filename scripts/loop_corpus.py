"""Run programs of tests/sanitize_corpus in loops of 50 rounds; their race occurs in one round, or in none.

    python scripts/loop_corpus.py --race-in 37 cupy_chain torch_views
    python scripts/loop_corpus.py --race-in 37 --fresh cupy_chain     # new streams and arrays in each round
    python scripts/loop_corpus.py --race-in 37 --threads 2 cupy_chain # two threads run the rounds in turn
    python scripts/loop_corpus.py --race-in 37 --one-allocation cupy_chain
    python scripts/loop_corpus.py --show cupy_chain                   # print the loop instead of running it

Rounds are counted from 1; with --race-in 0 no round has the race. A program is divided into statements that
run once (imports, functions, streams, arrays) and statements of a round. A statement that depends on the
variable ``race`` belongs to the round. scripts/check_loops.py runs the loops under cudakit.
"""

from __future__ import annotations

import argparse
import ast
import gc
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

CORPUS = Path(__file__).resolve().parent.parent / "tests/sanitize_corpus"
ROUNDS = 50
POOL_BYTES = 1 << 30
_WAITS = frozenset({"synchronize", "cuCtxSynchronize", "block_until_ready"})
_DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Loop:
    """The two parts of a program."""

    path: Path
    setup: tuple[ast.stmt, ...]  # statements that run once, before the first round
    round: tuple[ast.stmt, ...]  # statements that run in each round

    def __str__(self) -> str:
        setup, body = (
            "\n".join(map(ast.unparse, statements)) for statements in (self.setup, self.round)
        )
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        return f"{setup}\nfor round in range({ROUNDS}):\n{indented}"


def loop_of(path: Path, *, fresh: bool = False) -> Loop:
    """Divide a program; with ``fresh``, only imports and functions run once."""
    statements = [
        statement
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if not _assigns_race(statement)
    ]
    first_of_round = 0 if fresh else _first_of_round(statements)
    dependent_names = {"race"}
    setup: list[ast.stmt] = []
    body: list[ast.stmt] = []
    for index, statement in enumerate(statements):
        depends_on_race = bool(_names(statement, ast.Load) & dependent_names)
        if depends_on_race:
            dependent_names |= _names(statement, ast.Store)
        # A wait of the setup is repeated after statements of the round.
        is_needed_wait = _is_wait(statement) and bool(body)
        is_definition = isinstance(statement, _DEFINITIONS) or _opens_device(statement)
        runs_once = index < first_of_round or is_definition
        if runs_once and not depends_on_race and not is_needed_wait:
            setup.append(statement)
        else:
            body.append(statement)
    return Loop(path, tuple(setup), tuple(body))


def _first_of_round(statements: list[ast.stmt]) -> int:
    """Return the index of the first statement of a round: behind the last wait that work follows.

    Without such a wait, the round begins at the first statement after the setup that is no assignment,
    definition or capture of a graph.
    """
    last = len(statements)
    while last and _is_wait(statements[last - 1]):
        last -= 1
    waits = [index for index in range(last) if _is_wait(statements[index])]
    if waits:
        return waits[-1] + 1
    for index, statement in enumerate(statements):
        is_setup = isinstance(statement, ast.Assign | _DEFINITIONS) or _opens_device(statement)
        if not is_setup and not _is_docstring(statement) and not _captures_graph(statement):
            return index
    return 0


def _assigns_race(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and _names(statement, ast.Store) == {"race"}


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    """Return the variables that a statement reads (ast.Load) or assigns (ast.Store)."""
    nodes = list(ast.walk(statement))
    names = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }
    if context is ast.Load:  # "x += 1" reads x as well
        names |= {
            node.target.id
            for node in nodes
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
        }
    if context is ast.Store and isinstance(statement, ast.FunctionDef | ast.ClassDef):
        names.add(statement.name)
    return names


def _called_names(statement: ast.stmt) -> set[str]:
    functions = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return {
        function.attr if isinstance(function, ast.Attribute) else function.id
        for function in functions
        if isinstance(function, ast.Attribute | ast.Name)
    }


def _is_wait(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and bool(_called_names(statement) & _WAITS)


def _opens_device(statement: ast.stmt) -> bool:
    calls = _called_names(statement) & {"open_device", "setdefault"}
    return isinstance(statement, ast.Expr | ast.Assign) and bool(calls)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _captures_graph(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.With) and "graph" in {
        name for item in statement.items for name in _called_names(ast.Expr(item.context_expr))
    }


def _compiled(statements: Iterable[ast.stmt], path: Path) -> CodeType:
    """Compile statements; the frames of their code name the file and the lines of the program."""
    return compile(ast.Module(list(statements), []), str(path), "exec")


def run(
    loop: Loop, *, racing_round: int, threads: Iterator[ThreadPoolExecutor] | None = None
) -> dict[str, Any]:
    """Run a loop and return its variables. The race occurs in ``racing_round``, counted from 1.

    ``threads`` take turns to run the rounds; if it is None, this thread runs all of them.
    """
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(loop.path)}
    body = _compiled(loop.round, loop.path)
    exec(_compiled(loop.setup, loop.path), namespace)  # noqa: S102 it is a program of this repository
    for number in range(1, ROUNDS + 1):
        namespace["race"] = number == racing_round
        if threads is None:
            exec(body, namespace)  # noqa: S102 it is a program of this repository
        else:
            next(threads).submit(exec, body, namespace).result()
    return namespace


def _alternate(pools: list[ThreadPoolExecutor]) -> Iterator[ThreadPoolExecutor]:
    while True:
        yield from pools


def _use_one_allocation() -> None:
    """Make CuPy divide one allocation."""
    pool = import_module("cupy").get_default_memory_pool()
    memory = pool.malloc(POOL_BYTES)
    del memory


def _release_memory() -> None:
    """Return the memory of the last program to the driver, so that the next one gets other allocations."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.empty_cache()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--race-in", type=int, default=0, metavar="ROUND")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one-allocation", action="store_true")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(CORPUS))
    pools = [ThreadPoolExecutor(1) for _ in range(options.threads)]
    for name in options.programs:
        loop = loop_of(CORPUS / f"{name}.py", fresh=options.fresh)
        if options.show:
            print(loop)
            continue
        if options.one_allocation and name.startswith("cupy"):
            _use_one_allocation()
        threads = _alternate(pools) if options.threads > 1 else None
        run(loop, racing_round=options.race_in, threads=threads)
        print(f"finished {name}", flush=True)
        _release_memory()


if __name__ == "__main__":
    main()
