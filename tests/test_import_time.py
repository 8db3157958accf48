from __future__ import annotations

import subprocess
import sys

# Modules that `cudakit --help` may import besides the standard library.
ALLOWED_THIRD_PARTY = {"click"}
ALLOWED_OURS = {
    "cudakit",
    "cudakit.cli",
    "cudakit.cli.failure",
    "cudakit.cli.output",
    "cudakit.errors",
}

# Slow to import; no help text needs them.
FORBIDDEN_STANDARD = {"asyncio", "ctypes", "email", "importlib.metadata", "json", "multiprocessing"}

SCRIPT = """
import sys
before = set(sys.modules)
from cudakit.cli import main
code = main(["--help"])
print("---", *sorted(set(sys.modules) - before), sep="\\n")
sys.exit(code)
"""


def modules_of_help() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], check=True, capture_output=True, text=True
    )
    return set(done.stdout.partition("---\n")[2].split())


def test_help_imports_no_command_and_nothing_heavy() -> None:
    modules = modules_of_help()
    tops = {module.partition(".")[0] for module in modules}

    assert {module for module in modules if module.split(".")[0] == "cudakit"} == ALLOWED_OURS
    assert tops - sys.stdlib_module_names - {"cudakit"} == ALLOWED_THIRD_PARTY
    assert modules & FORBIDDEN_STANDARD == set()
