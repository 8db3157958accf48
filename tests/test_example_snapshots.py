"""The call stacks of the example snapshots name the lines of the example programs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cudakit.memory.load import load

FOLDER = Path(__file__).parents[1] / "examples" / "memory"
_PROGRAMS = {
    "kv_cache.pkl.gz": "kv_cache.py",
    "retained_graph.pkl.gz": "retained_graph.py",
    "retained_graph_fixed.pkl.gz": "retained_graph.py",
    "varying_lengths.pkl.gz": "varying_lengths.py",
}


def calling_lines(program: Path) -> set[tuple[str, int]]:
    """Return function name and line of each statement of a program that contains a call and no body."""
    tree = ast.parse(program.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lines = set()
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr | ast.Return):
            continue
        if not any(isinstance(node, ast.Call) for node in ast.walk(statement)):
            continue
        callers = [
            function.name
            for function in functions
            if function.lineno < statement.lineno <= (function.end_lineno or 0)
        ]
        lines.add((callers[-1] if callers else "<module>", statement.lineno))
    return lines


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.pkl.gz")))
def test_each_line_of_an_example_snapshot_is_a_call_in_its_program(name: str) -> None:
    program = _PROGRAMS[name]
    frames = load(str(FOLDER / name)).frames
    recorded = {(frame.name, frame.line) for frame in frames if frame.filename == program}
    assert recorded
    assert recorded <= calling_lines(FOLDER / program)
