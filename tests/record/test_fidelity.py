"""A supervised program sees the same environment and ends the same way as a plain one.

Each case runs a program twice, plain and supervised.
"""

from __future__ import annotations

import json
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from record.programs import Outcome, plain, supervised

from cudakit.record.protocol import AGENT

PORTRAIT = """
import json, os, sys, warnings
seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "path": sys.path,
    "name": __name__,
    "file": globals().get("__file__", "none"),
    "annotations": "__annotations__" in globals(),
    "cached": repr(globals().get("__cached__", "none")),
    "spec": repr(getattr(globals().get("__spec__"), "name", None)),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "package": repr(__package__),
    "flags": repr(sys.flags),
    "warnings": repr(warnings.filters),
    "modules": sorted(name for name in sys.modules if name not in ("_json", "_bootlocale")),
    "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
    "importers": sorted(sys.path_importer_cache),
    "executable": sys.executable,
    "prefix": sys.prefix,
    "cwd": os.getcwd(),
    "stdin": sys.stdin.read(),
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.getfilesystemencoding()],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "excepthook": sys.excepthook is sys.__excepthook__,
    "switches": [sys.gettrace(), sys.getprofile(), sys.getrecursionlimit()],
    "threads": len(os.listdir("/proc/self/task")),
    "group": os.getpgrp(),
    "environment": sorted(set(os.environ) - {"PYTHONPATH"}),
}
print(json.dumps(seen))
"""

# Ways to start the same program: the plain command, and the arguments of "cudakit run".
WAYS = {
    "script": (["python", "sub/s.py"], ["sub/s.py"]),
    "module": (["python", "-m", "sub.s"], ["-m", "sub.s"]),
    "code": (["python", "-c", PORTRAIT], ["-c", PORTRAIT]),
    "directory": (["python", "app"], ["app"]),
    "python": (["python", "-X", "dev", "sub/s.py"], [sys.executable, "-X", "dev", "sub/s.py"]),
}
FACTS = (
    *(
        "argv",
        "orig_argv",
        "path",
        "name",
        "file",
        "annotations",
        "cached",
        "spec",
        "main",
        "package",
    ),
    *(
        "flags",
        "warnings",
        "modules",
        "finders",
        "importers",
        "executable",
        "prefix",
        "cwd",
        "stdin",
    ),
    *("encodings", "descriptors", "excepthook", "switches", "threads", "environment"),
)
# The only variables that a recorded program has in addition.
VARIABLES_OF_THE_AGENT = ("CUDAKIT_AGENT", "CUDAKIT_SPOOL", "CUDAKIT_SPOOL_FRAMES")
ARGUMENTS = ["a", "--b", "-q", "--", "-o"]


@pytest.fixture(scope="module")
def portraits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """Return the environment that a program saw, plain and supervised; each way runs once."""
    directory = tmp_path_factory.mktemp("portraits")
    (directory / "sub").mkdir()
    (directory / "app").mkdir()
    (directory / "sub/s.py").write_text(PORTRAIT)
    (directory / "app/__main__.py").write_text(PORTRAIT)
    environments_by_way: dict[str, tuple[Any, Any]] = {}

    def environments(way_to_start: str) -> tuple[Any, Any]:
        if way_to_start not in environments_by_way:
            command, arguments = WAYS[way_to_start]
            runs = (
                plain([*command, *ARGUMENTS], cwd=directory, stdin="given\n"),
                supervised([*arguments, *ARGUMENTS], cwd=directory, stdin="given\n"),
            )
            assert [run.stderr for run in runs] == ["", ""]
            first, second = (json.loads(run.stdout) for run in runs)
            environments_by_way[way_to_start] = first, second
        return environments_by_way[way_to_start]

    return environments


@pytest.mark.parametrize("way_to_start", WAYS)
@pytest.mark.parametrize("fact", FACTS)
def test_program_sees_the_same_environment_as_without_cudakit(
    portraits: Callable[[str], tuple[Any, Any]], way_to_start: str, fact: str
) -> None:
    expected, supervised_outcome = portraits(way_to_start)
    if fact == "environment":
        expected = {fact: sorted([*expected[fact], *VARIABLES_OF_THE_AGENT])}

    assert supervised_outcome[fact] == expected[fact]


def test_matrix_covers_every_fact(portraits: Callable[[str], tuple[Any, Any]]) -> None:
    assert set(portraits("script")[0]) - {"group"} == set(FACTS)
    assert portraits("script")[0]["argv"] == ["sub/s.py", *ARGUMENTS]
    assert portraits("script")[0]["stdin"] == "given\n"


def body(code: str) -> str:
    return textwrap.dedent(code)


ENDS = {
    "falls off its end": "print('done')",
    "sys.exit(3)": "import sys; sys.exit(3)",
    "sys.exit with a message": "import sys; sys.exit('no such thing')",
    "an exception": "def f():\n    return 1 / 0\nf()",
    "a chain of exceptions": "try:\n    1 / 0\nexcept Exception as e:\n    raise ValueError(2) from e",
    "a syntax error": "def f(:\n",
    "a missing module": "import no_such_module_at_all",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "SIGPIPE": "import os, signal; signal.signal(13, signal.SIG_DFL); os.kill(os.getpid(), 13)",
    "abort": "import os; os.abort()",
    "os._exit(4)": "import os; os._exit(4)",
    "os.execv": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(5); exit(6)'])",
    "a warning": "import warnings; warnings.warn('careful')",
    "atexit": "import atexit; atexit.register(print, 'last words')",
    "an error at exit": "import atexit; atexit.register(divmod, 1, 0)",
    "a resource warning": "import sys; open(sys.argv[0]); print(1)",
}

STATUS = {"sys.exit(3)": 3, "an exception": 1, "SIGINT": -2, "SIGTERM": -15, "SIGSEGV": -11}


@pytest.mark.parametrize("end", ENDS)
def test_program_ends_as_without_cudakit(tmp_path: Path, end: str) -> None:
    (tmp_path / "s.py").write_text(ENDS[end])

    expected = plain(["python", "s.py"], cwd=tmp_path)

    assert supervised(["s.py"], cwd=tmp_path) == expected
    assert expected.status == STATUS.get(end, expected.status)


def test_traceback_has_only_frames_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise ValueError('wrong')")

    completed = supervised(["s.py"], cwd=tmp_path)

    assert completed.stderr.count("  File ") == 1


PROGRAMS = {
    "pickles what is in __main__": """
        import pickle
        class Point: pass
        print(pickle.loads(pickle.dumps(Point())).__class__.__module__)
    """,
    "reads its input": "import sys; print(sys.stdin.read().upper())",
    "starts a Python": """
        import subprocess, sys
        print(subprocess.run([sys.executable, "-c", "import sys; print(sys.path); exit(7)"]).returncode)
    """,
    "starts a Python with an environment of its own": """
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import sys; print(sys.path)"], env={})
    """,
    "starts a shell": "import os; print(os.system('echo $0; exit 3'))",
    "forks": """
        import os
        pid = os.fork()
        if not pid:
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """,
    "has threads": """
        import threading
        threads = [threading.Thread(target=print, args=(n,)) for n in range(3)]
        for thread in threads: thread.start(); thread.join()
    """,
    "handles SIGTERM": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        os.kill(os.getpid(), signal.SIGTERM)
    """,
    "knows which signals are ignored": """
        import signal
        print([signal.getsignal(n) for n in sorted(signal.valid_signals())])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """,
    **{
        f"has processes of multiprocessing, by {method}": f"""
            import multiprocessing as mp, os, sys
            def work(n):
                return n * n, __name__ == "__main__", sys.path
            if __name__ == "__main__":
                mp.set_start_method("{method}")
                with mp.Pool(1) as pool:
                    print(pool.map(work, range(3)))
        """
        for method in ("fork", "spawn", "forkserver")
    },
    "uses a resource that is tracked": """
        from multiprocessing.shared_memory import SharedMemory
        memory = SharedMemory(create=True, size=10)
        memory.close(); memory.unlink()
    """,
}


@pytest.mark.parametrize("program_name", PROGRAMS)
def test_program_behaves_as_without_cudakit(tmp_path: Path, program_name: str) -> None:
    (tmp_path / "s.py").write_text(body(PROGRAMS[program_name]))

    expected = plain(["python", "s.py"], cwd=tmp_path, stdin="some text")

    assert supervised(["s.py"], cwd=tmp_path, stdin="some text") == expected
    assert expected.status in (0, 9)


def run_both(words: list[str], *, cwd: Path, **more: str) -> tuple[Outcome, Outcome]:
    return plain(["python", *words], cwd=cwd, **more), supervised(words, cwd=cwd, **more)


CUSTOM = {
    "prints": "import sys; print('custom', __name__, __file__, sys.modules[__name__].__spec__.name)",
    "is kept": "answer = 42",
    "fails": "1 / 0",
    "lacks a module": "import no_such_module_at_all",
    "looks at the path": "import sys; print(sys.path)",
}


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
@pytest.mark.parametrize("program_name", CUSTOM)
def test_user_customization_runs_as_without_cudakit(
    tmp_path: Path, program_name: str, name: str
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / f"lib/{name}.py").write_text(CUSTOM[program_name])
    script = (
        f"import sys; m = sys.modules.get('{name}'); print(m); print(m and getattr(m, 'answer', 0))"
    )
    (tmp_path / "s.py").write_text(script)

    expected, supervised_outcome = run_both(
        ["s.py"], cwd=tmp_path, PYTHONPATH=str(tmp_path / "lib")
    )

    assert supervised_outcome == expected


def test_agent_directory_contains_only_sitecustomize() -> None:
    assert [path.name for path in AGENT.iterdir() if path.name != "__pycache__"] == [
        "sitecustomize.py"
    ]


@pytest.mark.parametrize("name", ["start", "memory", "agent", "path", "json", "typing"])
def test_agent_hides_no_modules_of_the_program(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("print('mine')")
    (tmp_path / "s.py").write_text(f"import {name}")

    expected, supervised_outcome = run_both(["s.py"], cwd=tmp_path)

    assert supervised_outcome == expected
    assert "mine" in supervised_outcome.stdout


def test_console_script_runs_as_without_cudakit(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_one(): pass\ndef test_two(): assert 0\n")
    pytest_script = str(Path(sys.executable).with_name("pytest"))
    if not Path(pytest_script).exists():
        pytest.skip("pytest has no console script here")
    words = [pytest_script, "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line"]

    expected = plain(words, cwd=tmp_path)
    supervised_outcome = supervised(words, cwd=tmp_path)

    assert supervised_outcome.status == expected.status == 1
    assert supervised_outcome.stdout.split(" in ")[0] == expected.stdout.split(" in ")[0]


def test_non_python_program_runs(tmp_path: Path) -> None:
    words = ["sh", "-c", "cat; echo $0 $#; exit 12", "a", "b"]

    expected = plain(words, cwd=tmp_path, stdin="text\n")

    assert supervised(words, cwd=tmp_path, stdin="text\n") == expected
    assert expected.status == 12


def test_program_inherits_blocked_and_ignored_signals(tmp_path: Path) -> None:
    words = ["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"]

    def signals(completed: Outcome) -> list[int]:
        # Signals 32 and 33 are left out, because the C library uses them itself.
        return [int(line.split()[1], 16) & 0x7FFF_FFFF for line in completed.stdout.splitlines()]

    assert signals(supervised(words, cwd=tmp_path)) == signals(plain(words, cwd=tmp_path))


def test_shell_script_without_shebang_runs(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("echo $1; exit 5")
    (tmp_path / "run").chmod(0o755)

    completed = supervised(["./run", "x"], cwd=tmp_path)

    assert (completed.status, completed.stdout) == (5, "x\n")


def test_status_of_non_python_program_reports_the_signal(tmp_path: Path) -> None:
    completed = supervised(["sh", "-c", "kill -USR2 $$"], cwd=tmp_path)

    assert completed.status == -signal.SIGUSR2
