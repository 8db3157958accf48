"""Run ``cudakit memviz`` on damaged files, and fail if the command crashes, hangs, or writes bad output.

    python scripts/fuzz_memviz.py [--seconds 60] [--seed 0] [--jobs N] [--case NUMBER]

Each case is a file of tests/data/fuzz with a few changes: bytes, opcodes, numbers, texts, shared containers,
truncation, compression. The seed and the case number determine the file, so ``--case NUMBER`` repeats a
failure, and writes the file of the case to the current directory. For each case:

* the compiled pickle reader and the one in Python must accept the same file, and read the same snapshot from
  it, or reject it at the same byte for the same reason;
* the command, with one of its outputs, must end with 0, 1 or 2, within 10 seconds and 1.5 GB;
* the output must be well-formed, without control characters and bidirectional characters.

Exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import pickle
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cudakit.memory.load.pickled import Machine

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "data" / "fuzz"
MAX_SECONDS = 10
MAX_BYTES = 1536 << 20
# Limit of the address space of a process in bytes. Files that expand to huge snapshots are refused before.
ADDRESS_SPACE = 4 << 30
# Number of cases of one process: a new process is needed for the peak memory of later cases.
RESTART_EVERY = 2000

_OPCODES = [bytes([code]) for code in b"(]})NldtaesuN012\x85\x86\x87\x88\x89\x94.e"]
_ARGUMENTS = [b"K\x01", b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\0", b"G" + bytes(8),
              b"h\x00", b"h\x01", b"h\x05", b"j\x02\0\0\0", b"\x8c\x01a", b"X\0\0\0\0", b"q\x00", b"V\xe9\n",
              b"I01\n", b"L7L\n", b"F1e999\n", b"\x8b\x05\0\0\0\xff\xff\xff\xff\x7f"]  # fmt: skip
_NUMBERS = [0, 1, -1, -(2**63), 2**61 - 1, 2**63 - 1, 2**64 - 1]
_NUMBERS += [2**power for power in (31, 47, 49, 57, 63, 64, 70)]
_VALUES = [None, True, 1.5, float("nan"), "", "x", "alloc", "START", "9" * 18, "\x1b[31m\u202e\x9b;=@",
           [], {}, [[]], (0, 1)]  # fmt: skip
_OUTPUTS = [
    (), ("--json",), ("-q",), ("--at", "end"), ("--at", "oom"), ("--top", "0"), ("-o", "x.html"),
    ("-o", "x.csv"), ("-o", "x.perfetto.json"), ("-o", "x.speedscope.json"), ("-o", "x.collapsed"),
    ("-o", "x.md"), ("-o", "x.json"), ("--diff", "OTHER"), ("--what-if", "expandable_segments:True"),
]  # fmt: skip
_UNSAFE = re.compile(
    "[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class Failure(Exception):
    """Raised if a case violates one of the rules of this script."""


# --- files ----------------------------------------------------------------------------------------


@cache
def corpus() -> list[tuple[str, bytes]]:
    """Return the names and the uncompressed contents of the corpus."""
    files = sorted(path for path in CORPUS.iterdir() if path.suffix in (".pkl", ".json", ".gz"))
    contents = [(path, path.read_bytes()) for path in files]
    return [
        (path.name, gzip.decompress(content) if path.suffix == ".gz" else content)
        for path, content in contents
    ]


def case_file(seed: int, number: int) -> tuple[str, bytes]:
    """Return a description and the content of a case."""
    rng = random.Random(f"{seed} {number}")
    sources = corpus()
    name, content = rng.choice(sources)
    changes = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change = rng.choice(_CHANGES)
        content = change(rng, content, sources)
        changes.append(change.__name__)
    if rng.random() < 0.1:
        content = gzip.compress(content, 1, mtime=0)
    return f"{name}: {', '.join(changes)}", content


def change_bytes(rng: random.Random, content: bytes, _: Any) -> bytes:
    """Replace up to five bytes by random ones."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 2, 5))):
        if damaged:
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def insert_opcodes(rng: random.Random, content: bytes, _: Any) -> bytes:
    """Insert opcodes of the pickle protocol."""
    offset = rng.randrange(len(content) + 1)
    words = (rng.choice(rng.choice((_OPCODES, _ARGUMENTS))) for _ in range(rng.randrange(1, 6)))
    return content[:offset] + b"".join(words) + content[offset:]


def cut(rng: random.Random, content: bytes, _: Any) -> bytes:
    """Remove the end of the content, or a range of its bytes."""
    offset = rng.randrange(len(content) + 1)
    return content[:offset] + (content[offset + rng.randrange(40) :] if rng.random() < 0.7 else b"")


def repeat(rng: random.Random, content: bytes, _: Any) -> bytes:
    """Repeat a range of bytes many times."""
    offset = rng.randrange(len(content) + 1)
    repeated = content[offset : offset + rng.choice((1, 4, 30, 200))]
    return content[:offset] + repeated * rng.choice((1, 2, 50, 2000)) + content[offset:]


def splice(rng: random.Random, content: bytes, sources: list[tuple[str, bytes]]) -> bytes:
    """Join the start of one file and the end of another."""
    second = rng.choice(sources)[1]
    return content[: rng.randrange(len(content) + 1)] + second[rng.randrange(len(second) + 1) :]


def change_values(rng: random.Random, content: bytes, _: Any) -> bytes:
    """Change values of a valid file: replace, delete, share or nest them."""
    try:
        root = json.loads(content) if content[:1] in b"{[" else Machine(content).run()
    except Exception:  # noqa: BLE001 an earlier change damaged the file
        return content
    containers = [node for node in _containers(root) if node]
    for _ in range(rng.choice((1, 3, 10))):
        if containers:
            _change_value(rng, rng.choice(containers), containers)
    with contextlib.suppress(RecursionError, TypeError, ValueError):
        if content[:1] in b"{[":
            return json.dumps(root).encode()
        return pickle.dumps(root, rng.randrange(6))
    return content


def _containers(root: Any) -> Iterator[Any]:
    """Yield each dictionary and list of a tree once."""
    visited: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if not isinstance(node, (dict, list)) or id(node) in visited:
            continue
        visited.add(id(node))
        yield node
        pending += node.values() if isinstance(node, dict) else node


def _change_value(rng: random.Random, container: Any, containers: list[Any]) -> None:
    """Change one item of a container; ``containers`` has all containers of the tree."""
    keys = list(container) if isinstance(container, dict) else range(len(container))
    if not keys:
        return
    key = rng.choice(keys)
    match rng.randrange(6):
        case 0 | 1:
            container[key] = rng.choice(_NUMBERS)
        case 2:
            container[key] = rng.choice(_VALUES)
        case 3:
            container[key] = rng.choice(containers)
        case 4:
            del container[key]
        case 5 if isinstance(container, list):
            container += [container[key]] * rng.choice((1, 100, 5000))


_CHANGES: tuple[Callable[[random.Random, bytes, Any], bytes], ...] = (
    change_bytes, change_bytes, insert_opcodes, cut, repeat, splice,
    change_values, change_values, change_values,
)  # fmt: skip


# --- rules ----------------------------------------------------------------------------------------


def check_readers(content: bytes) -> str:
    """Require that both pickle readers agree; return the outcome in one word."""
    if content[:1] not in b"\x80(]}c" or not content:
        return "no pickle"
    outcomes = [_snapshot_or_error(content, native=native) for native in (True, False)]
    if outcomes[0] != outcomes[1]:
        raise Failure(
            f"the readers disagree: {str(outcomes[0])[:300]} and {str(outcomes[1])[:300]}"
        )
    return "rejected" if isinstance(outcomes[0], str) else "read"


def _snapshot_or_error(content: bytes, *, native: bool) -> object:
    from cudakit.errors import SnapshotError
    from cudakit.memory import load
    from cudakit.memory.load import pickled
    from cudakit.memory.load.tree import memory_error

    try:
        tree = pickled.read(content, native=native)
        snapshot = load.build(tree, source="x", file_format="pickle", size_bytes=len(content))
    except SnapshotError as error:
        # The readers need different amounts of memory.
        too_large = error.message.startswith(memory_error(0).message[:30])
        return "memory" if too_large else error.message
    return _comparable(snapshot)


def _comparable(value: Any) -> Any:
    if is_dataclass(value):
        return [_comparable(getattr(value, field.name)) for field in fields(value)]
    if hasattr(value, "tobytes"):
        return value.dtype.str, value.tobytes()
    if isinstance(value, (tuple, list)):
        return [_comparable(item) for item in value]
    return repr(value)


def check_command(number: int, content: bytes) -> str:
    """Run the command with one of its outputs; return the exit code as text."""
    from cudakit.cli import main

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "case.pkl")
        file.write_bytes(content)
        other_file = sorted(CORPUS.iterdir())[0]
        options = [
            str(other_file) if word == "OTHER" else word
            for word in _OUTPUTS[number % len(_OUTPUTS)]
        ]
        if "-o" in options:
            options[-1] = str(Path(folder, options[-1]))
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = main(["memviz", str(file), *options])
        if code not in (0, 1, 2):
            raise Failure(f"{options} ended with {code}: {stderr.getvalue()[-2000:]}")
        texts = [stdout.getvalue(), stderr.getvalue()]
        if "-o" in options and Path(options[-1]).exists():
            texts.append(Path(options[-1]).read_text("utf-8"))
        for text in texts:
            _check_text(text, options)
        if options == ["--json"]:
            json.loads(stdout.getvalue())
    return f"exit {code}"


def _check_text(text: str, options: list[str]) -> None:
    if unsafe := _UNSAFE.search(text):
        at = unsafe.start()
        raise Failure(f"{options} wrote {unsafe[0]!a} after {text[max(at - 60, 0) : at]!a}")
    if (
        options[-1:]
        and options[-1].endswith("json")
        and options[0] == "-o"
        and text.startswith("{")
    ):
        json.loads(text)


# --- processes ------------------------------------------------------------------------------------


def run_cases(seed: int, first: int, step: int) -> None:
    """Run RESTART_EVERY cases, or until one fails. Print a line before and after each case."""
    os.environ["CUDAKIT_DEBUG"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for number in range(first, first + step * RESTART_EVERY, step):
        print("begin", number, flush=True)
        description, content = case_file(seed, number)
        start = time.process_time()
        try:
            outcome = f"{check_readers(content)}, {check_command(number, content)}"
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            if time.process_time() - start > MAX_SECONDS:
                raise Failure(f"took {time.process_time() - start:.0f} s")
            if peak_bytes > MAX_BYTES:
                raise Failure(f"took {peak_bytes >> 20} MiB")
        except BaseException:  # noqa: BLE001 all are failures of the case
            print("failed", json.dumps(f"{description}\n{traceback.format_exc()}"), flush=True)
            raise SystemExit(1) from None
        print("ended", outcome, flush=True)


@dataclass(slots=True)
class Worker:
    """A process that runs cases, and the case that it runs now."""

    process: subprocess.Popen[str]
    number: int  # number of the current case
    begun_at: float  # start of the current case on the monotonic clock, in seconds


def start_worker(seed: int, number: int, step: int) -> Worker:
    """Start a process that runs the cases ``number``, ``number + step`` and so on."""
    command = [
        sys.executable,
        "-P",
        __file__,
        "--worker",
        str(number),
        str(step),
        "--seed",
        str(seed),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    return Worker(process, number, time.monotonic())


def fuzz(seed: int, seconds: float, jobs: int) -> Counter[str]:
    """Run cases in several processes for a time; print failures; return the number of cases by outcome."""
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    workers = [start_worker(seed, number, jobs) for number in range(jobs)]
    while time.monotonic() < end:
        streams = [worker.process.stdout for worker in workers]
        ready, _, _ = select.select(streams, [], [], 0.5)
        for i, worker in enumerate(workers):
            if worker.process.stdout in ready:
                if not _read_line(worker, counts):
                    workers[i] = start_worker(seed, worker.number + jobs, jobs)
            # Cases are slower with other processes on the same cores.
            elif time.monotonic() - worker.begun_at > 4 * MAX_SECONDS:
                _report(worker, f"no end after {4 * MAX_SECONDS} s", counts)
                worker.process.kill()
                workers[i] = start_worker(seed, worker.number + jobs, jobs)
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
    return counts


def _read_line(worker: Worker, counts: Counter[str]) -> bool:
    """Read one line from a worker and count its outcome; return False if the process has ended."""
    word, _, rest = (
        (worker.process.stdout.readline() if worker.process.stdout else "").strip().partition(" ")
    )
    if word == "begin":
        worker.number, worker.begun_at = int(rest), time.monotonic()
    elif word == "ended":
        counts[rest] += 1
    elif word == "failed":
        _report(worker, json.loads(rest), counts)
    else:
        status = worker.process.wait()
        if status < 0 or status > 1:
            errors = worker.process.stderr.read() if worker.process.stderr else ""
            _report(worker, f"the process ended with {status}: {errors[-2000:]}", counts)
        return False
    return True


def _report(worker: Worker, text: str, counts: Counter[str]) -> None:
    counts["failed"] += 1
    print(f"case {worker.number} failed: {text}\n", file=sys.stderr, flush=True)


def main() -> int:
    """Run cases for the given time, or repeat one case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="time to run (default: 60)")
    parser.add_argument(
        "--seed", type=int, default=0, help="number that chooses the cases (default: 0)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)"
    )
    parser.add_argument("--case", type=int, help="repeat this case only")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_cases(arguments.seed, *arguments.worker)
        return 0
    if arguments.case is not None:
        description, content = case_file(arguments.seed, arguments.case)
        file = Path(f"case-{arguments.seed}-{arguments.case}.pkl")
        file.write_bytes(content)
        print(f"{description}; {len(content):,} bytes; written to {file}")
        print(check_readers(content), check_command(arguments.case, content))
        return 0
    counts = fuzz(arguments.seed, arguments.seconds, arguments.jobs)
    for outcome, count in counts.most_common():
        print(f"{count:8,}  {outcome}")
    print(f"{counts.total():8,}  cases, seed {arguments.seed}")
    return 1 if counts["failed"] or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
