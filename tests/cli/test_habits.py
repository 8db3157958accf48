"""Output options, exit codes and help that all commands share, as README and the docs document them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from invocation import Cli, CliRun, run_cli
from profile_synthetic import Program

from cudakit.cli import COMMANDS, load_command, program
from cudakit.cli.bench import BenchGroup
from cudakit.cli.bench import load_command as load_benchmark
from cudakit.cli.options import Command, Option, Value
from cudakit.cli.sanitize import FORMATS

ROOT = Path(__file__).parents[2]
OOM = ROOT / "tests" / "data" / "oom.pkl.gz"
RACE = ROOT / "examples" / "races" / "sim_copies_race.py"
SAVED = "saved.json"
LOG = "races.log"
PROFILE_LOG = "profile.log"
SAVED_FILES = (SAVED, LOG, PROFILE_LOG)

# A command line of each command that has a report; "saved.json" is a result of bench, "races.log"
# is a log of run --sanitize, "profile.log" one of run --profile.
LINES = {
    "bench alloc": ["--gpu", "sim", "--sizes", "4KiB", "--allocators", "driver"],
    "bench compare": [SAVED, SAVED],
    "bench copy": ["--gpu", "sim", "--sizes", "4KiB", "--directions", "h2d"],
    "bench gemm": ["--gpu", "sim", "16"],
    "bench gds": ["--gpu", "sim", "--sizes", "4KiB", "--threads", "1"],
    "bench graph": ["--gpu", "sim", "--nodes", "1", "--topologies", "chain", "--steps", "launch"],
    "bench launch": ["--gpu", "sim", "--calls", "launch"],
    "bench memory": ["--gpu", "sim", "--sizes", "64KiB", "--operations", "copy"],
    "bench nccl": ["--gpu", "sim", "--sizes", "4KiB", "--operations", "broadcast"],
    "bench ops": ["--gpu", "sim", "--sizes", "64", "--operations", "add", "--timings", "eager"],
    "bench suite": ["--gpu", "sim", "--quick"],
    "cache clear": [],
    "cache show": [],
    "devices": ["--gpu", "sim"],
    "doctor": ["--gpu", "sim"],
    "explain": ["700"],
    "memviz": [str(OOM)],
    "profile": [PROFILE_LOG],
    "run": ["--sanitize", str(RACE)],
    "sanitize": [LOG],
}
HAS_DRIVER = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
# Commands that need a GPU without --gpu sim.
GPU_COMMANDS = [name for name, line in LINES.items() if "--gpu" in line and name != "doctor"]
# Commands without a report.
WITHOUT_REPORT = {"completion", "cache warm"}
SCHEMAS = {
    "bench compare": "cudakit.bench.compare/1",
    "bench suite": "cudakit.suite/1",
    "cache clear": "cudakit.cache/1",
    "cache show": "cudakit.cache/1",
    "devices": "cudakit.devices/1",
    "doctor": "cudakit.doctor/1",
    "explain": "cudakit.explain/1",
    "memviz": "cudakit.memviz/1",
    "profile": "cudakit.profile/1",
    "run": "cudakit.sanitize/1",
    "sanitize": "cudakit.sanitize/1",
}
# Characters that only a report draws with.
_BOX = re.compile("[━─│┤█▏]")


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command that is not a group, with its full name."""
    for name in COMMANDS:
        command = load_command(name)
        if isinstance(command, click.Group):
            for inner, member in command.commands.items():
                is_bench = isinstance(command, BenchGroup)
                yield f"{name} {inner}", load_benchmark(inner) if is_bench else member
        else:
            yield name, command


ALL = dict(commands())
EACH = pytest.mark.parametrize("name", LINES)


def formats_of(name: str) -> list[str]:
    """Read the formats of a command from the help of ``-o``; ``run`` has those of races here."""
    if name == "run":
        return list(FORMATS)
    (option,) = (option for option in options_of(ALL[name]) if "-o" in option.opts)
    # The formats end in a full stop; the next sentence may name options with fewer formats.
    formats_text = (option.help or "").partition("selects the format: ")[2].partition(". ")[0]
    return re.findall(r"\.([a-z]+(?:\.json)?(?:\.gz)?)\b", formats_text)


def options_of(command: click.Command) -> list[Option]:
    return [option for option in command.params if isinstance(option, Option)]


def terminal(name: str, done: CliRun) -> str:
    """Return the stream of the report: stderr for ``run``, whose stdout belongs to the program."""
    return done.stderr if name == "run" else done.stdout


@dataclass(frozen=True, slots=True)
class Place:
    """A directory to run commands in."""

    path: Path

    def run(self, name: str, *options: str) -> CliRun:
        line = [self.file(word) if word in SAVED_FILES else word for word in LINES[name]]
        return run_cli(*name.split(), *options, *line)

    def file(self, name: str) -> str:
        return str(self.path / name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    run_cli("bench", "launch", *LINES["bench launch"], "-o", str(place / SAVED))
    run_cli("run", "--log", str(place / LOG), *LINES["run"])
    program = Program()
    program.kernel("k", 10_000, line=3)
    program.write_log(place / PROFILE_LOG)
    return place


@pytest.fixture
def place(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDAKIT_CACHE_DIR", str(tmp_path / "cache"))
    for name in SAVED_FILES:
        shutil.copy(saved / name, tmp_path)
    return Place(tmp_path)


# --- options ---------------------------------------------------------------------------------------


def test_every_command_has_a_line_here() -> None:
    assert set(ALL) == set(LINES) | WITHOUT_REPORT


def test_output_options_have_the_same_names_and_help_on_every_command() -> None:
    described: dict[str, set[tuple[str, str]]] = {}
    for name in LINES:
        group = [option for option in options_of(ALL[name]) if option.group == "Output"]
        for option in group:
            if not option.hidden:
                names = ", ".join(option.opts)
                text = re.sub(r"(?<=format: ).*(?=\. Repeatable)", "", option.help or "")
                described.setdefault(names, set()).add(
                    (
                        name if name == "run" and option.opts[-1] in ("--json", "--output") else "",
                        text,
                    )
                )
        assert {"-o, --output", "-f, --force", "--json", "-q, --quiet"} <= {
            ", ".join(option.opts) for option in group
        }

    # The report and the JSON of run go to standard error, because standard output belongs to the program.
    assert {names: len(texts) for names, texts in described.items()} == {
        "-o, --output": 2,
        "-f, --force": 1,
        "--json": 2,
        "-q, --quiet": 1,
    }


@pytest.mark.parametrize("spelling", ["--gpu", "--top", "--device"])
def test_option_with_the_same_name_has_the_same_metavar(spelling: str) -> None:
    options = [option for command in ALL.values() for option in options_of(command)]
    metavars = {option.metavar for option in options if spelling in option.opts}

    assert len(metavars) == 1


def test_every_command_that_opens_a_gpu_can_simulate_it() -> None:
    offering = {
        name
        for name, command in ALL.items()
        if any("--gpu" in option.opts for option in options_of(command))
    }

    assert offering == set(LINES) - {
        "bench compare",
        "cache clear",
        "cache show",
        "explain",
        "memviz",
        "profile",
        "run",
        "sanitize",
    }


def test_every_shown_option_has_a_help_and_is_in_a_group() -> None:
    shown = [
        (name, option)
        for name, command in ALL.items()
        for option in options_of(command)
        if not option.hidden
    ]

    assert [(name, option.opts) for name, option in shown if not option.help] == []
    assert all(isinstance(command, Command) for command in ALL.values())


def test_every_file_is_completed_by_the_shell() -> None:
    """A parameter with FILE in its metavar completes file names, and others of text complete values."""
    files = [
        (name, parameter.name)
        for name, command in ALL.items()
        for parameter in command.params
        if re.search("FILE|SNAPSHOT|BEFORE|AFTER|SCRIPT|PYTHON", parameter.metavar or "")
        and not isinstance(parameter.type, (click.Path, Value))
    ]

    assert files == []


@pytest.mark.parametrize("name", [*ALL, "bench", ""])
def test_help_fits_80_columns(name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli(*name.split(), "--help").stdout.splitlines()
    examples = [line for line in lines if line.startswith(("  cudakit ", "  CUDA_VISIBLE"))]

    assert [line for line in lines if len(line) > 80 and line not in examples] == []


# --- output ----------------------------------------------------------------------------------------


@EACH
def test_file_replaces_the_report_and_is_named_on_stderr(name: str, place: Place) -> None:
    target = place.file("out.json")
    done = place.run(name, "-o", target)

    *summary, wrote = done.stderr.splitlines()
    assert done.exit_code in (0, 1)
    assert done.stdout == ""
    assert wrote == f"Wrote {target}"
    assert 1 <= len(summary) <= 4
    assert not _BOX.search(done.stderr)
    document = json.loads(Path(target).read_text())
    assert document["schema"] == SCHEMAS.get(name, "cudakit.bench/1")


@EACH
def test_every_format_is_written_and_nothing_is_printed_twice(name: str, place: Place) -> None:
    formats = formats_of(name)
    targets = [place.file(f"out.{form}") for form in formats]
    arguments = [word for target in (*targets, "-") for word in ("-o", target)]
    done = place.run(name, *arguments)

    assert {"json", "html", "md", "txt"} <= set(formats)
    assert done.exit_code in (0, 1)
    assert all(Path(target).stat().st_size for target in targets)
    named = "".join(f"Wrote {target}\n" for target in targets)
    assert done.stderr.endswith(named)
    text = Path(place.file("out.txt")).read_text()
    assert terminal(name, done).replace(named, "") == text
    assert terminal(name, done).count(text.splitlines()[0]) == 1


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("devices --gpu sim -o out.json", 0),
        ("devices --gpu sim", 2),
        ("devices --gpu sim -o out.json --json", 2),
        (f"run --sanitize {RACE}", 1),
    ],
)
def test_closed_stdout_is_an_error_only_if_it_is_needed(
    options: str, code: int, command: list[str], place: Place
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command, *options.split()],
        check=False,
        stderr=subprocess.PIPE,
        cwd=place.path,
    )

    assert done.returncode == code
    assert (b"standard output is closed" in done.stderr) == (code == 2)


@EACH
def test_json_is_one_document(name: str, place: Place) -> None:
    done = place.run(name, "--json")

    document = json.loads(terminal(name, done))
    assert document["schema"] == SCHEMAS.get(name, "cudakit.bench/1")


@EACH
def test_json_beside_a_file_is_one_document(name: str, place: Place) -> None:
    done = place.run(name, "--json", "-o", place.file("out.md"))

    json.loads(terminal(name, done))
    assert Path(place.file("out.md")).exists()


@EACH
def test_quiet_prints_at_least_one_line_and_no_table(name: str, place: Place) -> None:
    done = place.run(name, "-q")

    assert done.exit_code in (0, 1)
    assert terminal(name, done).strip()
    assert not _BOX.search(terminal(name, done))


@EACH
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("out.xyz", "this report has no format with this suffix"),
        ("out", "this report has no format with this suffix"),
        ("folder.json", "is a directory"),
        ("there.json", "there.json exists"),
        ("nowhere/out.json", "cannot write"),
    ],
)
def test_place_that_cannot_be_written_is_one_line_and_exit_code_2(
    name: str, target: str, reason: str, place: Place
) -> None:
    Path("folder.json").mkdir()
    Path("there.json").write_text("mine")
    done = place.run(name, "-o", "good.json", "-o", target)

    error, hint = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (125 if name == "run" else 2, "")
    assert error.startswith("cudakit: error: ")
    assert reason in error
    assert hint.startswith("hint: ")
    assert not Path("good.json").exists()
    assert Path("there.json").read_text() == "mine"
    if "suffix" in reason:
        assert all(f".{form}" in hint for form in formats_of(name))


@EACH
def test_usage_error_with_json_is_one_document_and_nothing_else(name: str, place: Place) -> None:
    done = place.run(name, "--json", "-o", "out.xyz")

    assert done.stdout + done.stderr == terminal(name, done)
    error = json.loads(terminal(name, done))["error"]
    assert error["kind"] == "UsageError"
    assert error["exit_code"] == (125 if name == "run" else 2)


@EACH
def test_unknown_option_names_the_help_of_the_command(name: str, place: Place) -> None:
    done = place.run(name, "--frobnicate")

    assert done.exit_code == (125 if name == "run" else 2)
    assert "--frobnicate" in done.stderr
    assert f"hint: see cudakit {name} --help" in done.stderr


# --- promises of README and the docs ---------------------------------------------------------------


def documented_lines() -> Iterator[tuple[str, str]]:
    """Yield the command lines in the code blocks of all pages, fenced or indented."""
    folders = (ROOT / "docs", ROOT / "examples")
    pages = [ROOT / "README.md", *(page for folder in folders for page in folder.rglob("*.md"))]
    for page in pages:
        is_fenced = False
        for line in page.read_text(encoding="utf-8").splitlines():
            is_fenced ^= line.startswith("```")
            match = re.match(r"(?:\$ |    )?(cudakit [^`▶]*)$", line)
            if match and (is_fenced or line.startswith("    ")):
                yield page.relative_to(ROOT).as_posix(), match[1]


def words_of(line: str) -> list[str]:
    """Return the arguments of cudakit in a line of a shell."""
    words = shlex.split(line, comments=True)[1:]
    ends = [words.index(end) for end in ("|", ">", "&&", "||", "<", "2>&1") if end in words]
    return words[: min(ends, default=len(words))]


@pytest.mark.parametrize(("page", "line"), sorted(set(documented_lines())))
def test_documented_command_line_is_valid(page: str, line: str) -> None:
    words = words_of(line)
    if not words or words[0] not in COMMANDS or {"...", "[OPTIONS]"} & set(words):
        pytest.skip(f"{page}: no whole command line")
    command, parent = load_command(words[0]), program.make_context("cudakit", [words[0]])
    rest = words[1:]
    if isinstance(command, click.Group) and rest and rest[0] in command.commands:
        command, rest = ALL[" ".join(words[:2])], rest[1:]
    with parent:
        command.make_context(words[0], rest, parent=parent)


def test_documented_schemas_are_those_of_the_json() -> None:
    text = (ROOT / "docs/reference/cudakit.md").read_text(encoding="utf-8")

    assert set(SCHEMAS.values()) | {"cudakit.bench/1"} <= set(
        re.findall(r"`(cudakit\.[^`]+/1)`", text)
    )


@pytest.mark.skipif(HAS_DRIVER, reason="there is a driver")
@pytest.mark.parametrize("name", GPU_COMMANDS)
def test_missing_driver_is_the_same_error_in_every_command(cli: Cli, name: str) -> None:
    arguments = [word for word in LINES[name] if word not in ("--gpu", "sim")]
    run = cli(*name.split(), *arguments)
    error, hint = run.stderr.splitlines()

    assert (run.exit_code, run.stdout) == (3, "")
    assert error == "cudakit: error: no CUDA driver found: libcuda.so.1 cannot be loaded"
    assert hint.endswith("cudakit doctor finds the cause; --gpu sim needs no GPU")
