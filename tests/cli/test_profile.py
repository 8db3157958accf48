"""``cudakit run --profile`` and ``cudakit profile`` from end to end, on simulated and synthetic programs."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from invocation import Cli
from profile_synthetic import MS, US, Program

from cudakit.trace.kinds import MemoryKind

SIMULATED = """
import numpy as np
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import host_kernel

COUNT = 1 << 16
SOURCE = 'extern "C" __global__ void add(float* numbers, float amount, int count) {}'


@host_kernel("add")
def add(launch, numbers, amount, count):
    launch.update(numbers, np.float32, count)[:] += amount


gpu = open_gpu("sim")
stream = gpu.stream()
numbers, batch = gpu.malloc(4 * COUNT), gpu.host_malloc(4 * COUNT, pinned=False)
kernel = gpu.kernel(gpu.load(gpu.compile(SOURCE)), "add")


def step():
    gpu.copy(numbers, batch, 4 * COUNT, stream)
    for _ in range(3):
        gpu.launch(kernel, (4, 1, 1), (256, 1, 1), (numbers, np.float32(1), np.int32(COUNT)), stream)
    gpu.sync_stream(stream)


for _ in range(6):
    step()
print("done")
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return tmp_path


def training(*, waits: bool = True) -> Program:
    """Return a program of ten steps with a forward pass, an optimizer and a pageable copy."""
    program = Program()
    program.host(20 * MS)
    for number in range(10):
        with program.range("step"):
            program.copy(8 << 20, 800 * US, line=12, host=MemoryKind.PAGEABLE)
            with program.range("forward"):
                for layer in range(8):
                    program.kernel("gemm", (900 if number == 0 else 150) * US, line=20 + layer % 2)
                    program.kernel("relu", 20 * US, line=30)
            if waits:
                program.synchronize(line=41)
            program.host(300 * US)
            program.kernel("adam", 60 * US, line=50)
    return program


def write_logs() -> None:
    training().write_log(Path("slow.log"))
    training(waits=False).write_log(Path("fast.log"))


# --- run --profile ---------------------------------------------------------------------------------


def test_run_reports_a_simulated_program(cli: Cli) -> None:
    Path("program.py").write_text(SIMULATED)
    done = cli("run", "--profile", "--log", "run.log", "program.py")
    assert done.exit_code == 0
    first, *_ = done.stderr.splitlines()
    assert first.startswith("Simulated: GPU busy")
    assert "of 6 steps" in first
    assert "program.py:" in done.stderr
    assert done.stderr.endswith("Wrote run.log\n")


def test_report_on_the_log_is_that_of_the_run(cli: Cli) -> None:
    Path("program.py").write_text(SIMULATED)
    cli("run", "--profile", "--log", "run.log", "-o", "run.json", "-o", "run.txt", "program.py")
    cli("profile", "run.log", "-o", "log.json", "-o", "log.txt")
    assert Path("log.json").read_bytes() == Path("run.json").read_bytes()
    assert Path("log.txt").read_bytes() == Path("run.txt").read_bytes()
    result = json.loads(Path("run.json").read_text())
    assert (result["schema"], result["simulated"]) == ("cudakit.profile/1", True)


def test_program_without_gpu_work_has_one_line_with_the_reason(cli: Cli) -> None:
    done = cli("run", "--profile", "-c", "print(1)")
    assert done.exit_code == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("cudakit: no GPU work was recorded, so there is no profile (")
    assert "CUDA" in line


def test_exit_code_is_that_of_the_program(cli: Cli) -> None:
    assert cli("run", "--profile", "-q", "-c", "raise SystemExit(7)").exit_code == 7


def test_required_gpu_is_missing_on_a_simulated_device(cli: Cli) -> None:
    Path("program.py").write_text(SIMULATED)
    assert cli("run", "--profile", "--require-gpu", "-q", "program.py").exit_code == 1


# --- reports ---------------------------------------------------------------------------------------


def test_report_begins_with_the_answer(
    cli: Cli, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_logs()
    monkeypatch.setenv("COLUMNS", "80")
    done = cli("profile", "slow.log")
    assert done.exit_code == 0
    golden("profile-80.txt", done.stdout)


def test_unknown_step_range_lists_the_ranges_of_the_profile(cli: Cli) -> None:
    write_logs()
    done = cli("profile", "slow.log", "--step-range", "epoch")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "cudakit: error: slow.log has no NVTX range 'epoch' in which work for a GPU was launched",
        "hint: ranges: forward, step",
    ]
    forward = cli("profile", "slow.log", "--step-range", "forward")
    assert (forward.exit_code, forward.stderr) == (0, "")


def test_quiet_report_has_the_answer_and_the_findings(cli: Cli) -> None:
    write_logs()
    lines = cli("profile", "slow.log", "-q").stdout.splitlines()
    assert lines[0].startswith("GPU busy")
    assert any("train.py:12" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("by", "shown", "hidden"),
    [
        ("kernel", "Kernels", ("Lines", "NVTX ranges")),
        ("line", "Lines", ("Kernels", "NVTX ranges")),
        ("range", "NVTX ranges", ("Kernels", "Lines")),
    ],
)
def test_by_selects_one_table(cli: Cli, by: str, shown: str, hidden: tuple[str, str]) -> None:
    write_logs()
    text = cli("profile", "slow.log", "--by", by).stdout
    assert f"── {shown} " in text
    assert not any(f"── {name} " in text for name in hidden)


@pytest.mark.parametrize(
    ("by", "text"),
    [
        ("kernel", "no kernel ran"),
        ("line", "no call stacks were recorded"),
        ("range", "no GPU work was launched in an NVTX range"),
    ],
)
def test_by_says_why_its_table_is_missing(cli: Cli, by: str, text: str) -> None:
    write_logs()
    cli("profile", "slow.log", "-o", "slow.json")
    result = json.loads(Path("slow.json").read_text())
    for name in ("kernels", "lines", "ranges"):
        result["devices"][0][name] = []
    Path("empty.json").write_text(json.dumps(result))
    assert f"i {text}\n" in cli("profile", "empty.json", "--by", by).stdout
    assert text not in cli("profile", "empty.json").stdout


def test_top_limits_rows_and_zero_shows_all(cli: Cli) -> None:
    write_logs()
    assert "--top 0 shows all" in cli("profile", "slow.log", "--top", "1").stdout
    assert "--top 0 shows all" not in cli("profile", "slow.log", "--top", "0").stdout


def test_saved_result_gives_the_report_of_its_log(cli: Cli) -> None:
    write_logs()
    cli("profile", "slow.log", "-o", "slow.json")
    assert cli("profile", "slow.json").stdout == cli("profile", "slow.log").stdout


def test_saved_result_has_no_timeline(cli: Cli) -> None:
    write_logs()
    cli("profile", "slow.log", "-o", "slow.json")
    done = cli("profile", "slow.json", "-o", "slow.trace.json")
    assert done.exit_code == 2
    assert done.stderr.startswith("cudakit: error: slow.trace.json needs a log")
    assert not Path("slow.trace.json").exists()


def test_every_export_is_written(cli: Cli) -> None:
    write_logs()
    suffixes = ("html", "md", "csv", "trace.json", "trace.json.gz", "pftrace", "speedscope.json")
    files = [f"out.{suffix}" for suffix in (*suffixes, "collapsed")]
    done = cli("profile", "slow.log", *(word for file in files for word in ("-o", file)))
    assert done.exit_code == 0
    assert all(Path(file).stat().st_size for file in files)
    assert "forward" in Path("out.trace.json").read_text()


def test_copies_are_compared_with_a_bench(cli: Cli) -> None:
    write_logs()
    cli(
        "bench", "copy", "--gpu", "sim", "--directions", "h2d", "--sizes", "1MiB", "-o", "copy.json"
    )
    text = cli("profile", "slow.log", "--bench", "copy.json").stdout
    assert "Limits that cudakit bench measured" in text
    assert "copies: host to device, pageable (limit of a simulated GPU)" in text
    Path("copy.json").write_text(
        Path("copy.json").read_text().replace('"simulated": true', '"simulated": false')
    )
    measured_text = cli("profile", "slow.log", "--bench", "copy.json").stdout
    assert "copies: host to device, pageable" in measured_text
    assert "limit of a simulated GPU" not in measured_text


def test_bench_without_copies_is_an_error(cli: Cli) -> None:
    write_logs()
    cli("bench", "gemm", "--gpu", "sim", "16", "-o", "gemm.json")
    done = cli("profile", "slow.log", "--bench", "gemm.json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "gemm.json has no copies" in done.stderr


def test_launches_and_copies_are_compared_with_two_benches(cli: Cli) -> None:
    write_logs()
    calls = ("--calls", "launch-back-to-back")
    copies = ("--directions", "h2d", "--sizes", "1MiB")
    cli("bench", "launch", "--gpu", "sim", *calls, "-o", "launch.json")
    cli("bench", "copy", "--gpu", "sim", *copies, "-o", "copy.json")
    text = cli("profile", "slow.log", "--bench", "copy.json", "--bench", "launch.json").stdout
    assert "--bench compared nothing" not in text
    assert "mean interval of kernel launches" in text
    assert "copies: host to device, pageable" in text


def test_bench_result_without_comparable_work_is_named(cli: Cli) -> None:
    write_logs()
    cli(
        "bench",
        "memory",
        "--gpu",
        "sim",
        "--operations",
        "write",
        "--sizes",
        "1MiB",
        "-o",
        "write.json",
    )
    text = cli("profile", "slow.log", "--bench", "write.json").stdout
    assert (
        "i --bench compared nothing: the profile has no memsets with a mean size of at least 1 MiB\n"
        in text
    )
    assert "Limits that cudakit bench measured" not in text


# --- comparison ------------------------------------------------------------------------------------


def test_diff_shows_the_change_of_a_step(
    cli: Cli, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_logs()
    monkeypatch.setenv("COLUMNS", "80")
    done = cli("profile", "slow.log", "--diff", "fast.log")
    assert done.exit_code == 0
    golden("profile-diff-80.txt", done.stdout)


def test_diff_of_two_ranks_names_the_rank_that_became_slower(cli: Cli) -> None:
    log_path = str(Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog")
    cli("profile", log_path, "-o", "before.json")
    result = json.loads(Path("before.json").read_text())
    result["devices"][1]["steps"]["median_ns"] *= 2
    Path("after.json").write_text(json.dumps(result))

    changed = cli("profile", "after.json", "--diff", "before.json", "--fail-on", "slower:5%")
    unchanged = cli("profile", "before.json", "--diff", log_path)

    assert changed.exit_code == 1
    assert changed.stdout.startswith("Step of rank 1, cuda:1 100% slower: ")
    assert "── rank 0, cuda:0 ──" in changed.stdout
    assert unchanged.stdout.startswith("Step unchanged on all GPUs\n")
    result |= {"devices": result["devices"][:1], "findings": []}
    Path("one.json").write_text(json.dumps(result))
    with_one = cli("profile", "one.json", "--diff", "before.json").stdout
    assert "! Not compared: rank 1, cuda:1 is only in the earlier profile." in with_one
    quiet_lines = cli("profile", "after.json", "--diff", "before.json", "-q").stdout.splitlines()
    assert [line.partition(", before")[0] for line in quiet_lines[1:]] == [
        "step of rank 0, cuda:0",
        "step of rank 1, cuda:1",
    ]


def test_diff_without_gpu_work_names_the_profile_without_it(cli: Cli) -> None:
    log_path = str(Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog")
    cli("profile", log_path, "-o", "full.json")
    result = json.loads(Path("full.json").read_text()) | {"devices": [], "findings": []}
    Path("empty.json").write_text(json.dumps(result))

    titles = [
        cli("profile", after, "--diff", before).stdout.splitlines()[0]
        for after, before in (
            ("full.json", "empty.json"),
            ("empty.json", "full.json"),
            ("empty.json", "empty.json"),
        )
    ]

    assert titles == [
        "Nothing to compare: the earlier profile (BEFORE) has no GPU work",
        "Nothing to compare: the later profile has no GPU work",
        "Nothing to compare: neither profile has GPU work",
    ]


def test_steps_by_optimizer_are_named_by_the_call(cli: Cli) -> None:
    log_path = str(Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog")
    text = " ".join(cli("profile", log_path).stdout.split())
    assert "37 steps measured; each ends with a call of optimizer.step() of PyTorch." in text
    assert "gaps of at least 1 ms between CUDA calls of the host; a mean can be shorter" in text


@pytest.mark.parametrize(("limit", "code"), [("slower:1%", 1), ("slower:90%", 0)])
def test_slower_step_fails(cli: Cli, limit: str, code: int) -> None:
    write_logs()
    cli("profile", "fast.log", "-o", "fast.json")
    arguments = ("--diff", "fast.json", "--fail-on", limit, "-q")
    assert cli("profile", "slow.log", *arguments).exit_code == code
    assert cli("profile", "fast.log", *arguments).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fail-on", "slower:5%"), "--fail-on slower needs --diff"),
        (("--diff", "fast.log", "--fail-on", "faster:5%"), "is not slower:PERCENT"),
        (("--diff", "fast.log", "--by", "kernel"), "--by has no effect with --diff"),
        (("--diff", "fast.log", "--bench", "fast.log"), "--bench has no effect with --diff"),
        (("--diff", "fast.log", "-o", "x.pftrace"), "this report has no format with this suffix"),
    ],
)
def test_wrong_options_are_usage_errors(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    write_logs()
    done = cli("profile", "slow.log", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr


# --- bad input -------------------------------------------------------------------------------------


def _refused(cli: Cli, file: str) -> str:
    done = cli("profile", file)
    assert (done.exit_code, done.stdout) == (2, "")
    error, *_ = done.stderr.splitlines()
    assert error.startswith("cudakit: error: ")
    return error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("text", "is not a profile"),
        ("{", "is not valid JSON: it ends too early"),
        ("[]", "is not a profile: it has no schema 'cudakit.profile/1'"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": "cudakit.profile/2"}', "has the schema 'cudakit.profile/2'"),
        ('{"schema": "cudakit.sanitize/1"}', "is a saved report of races, not a profile"),
        ('{"schema": "cudakit.profile/1"}', "is damaged: exit_status is missing"),
        ('{"schema": ' + "9" * 5000 + "}", "a number in its JSON is too long"),
    ],
)
def test_file_that_is_no_profile_is_refused(cli: Cli, content: str, message: str) -> None:
    Path("bad").write_text(content)
    assert message in _refused(cli, "bad")


def test_log_of_sanitize_names_the_command_for_it(cli: Cli) -> None:
    Path("program.py").write_text(SIMULATED)
    cli("run", "--sanitize", "--log", "races.log", "program.py")
    done = cli("profile", "races.log")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "races.log was written by run --sanitize" in done.stderr
    assert "cudakit sanitize races.log" in done.stderr


def test_sanitize_refuses_the_log_of_a_profile(cli: Cli) -> None:
    write_logs()
    done = cli("sanitize", "slow.log")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "slow.log was written by run --profile" in done.stderr
    assert "cudakit profile slow.log" in done.stderr


def test_missing_file_is_refused(cli: Cli) -> None:
    assert "absent.json does not exist" in _refused(cli, "absent.json")


@pytest.mark.parametrize("part", [0.1, 0.5, 0.99])
def test_truncated_log_is_refused(cli: Cli, part: float) -> None:
    write_logs()
    content = Path("slow.log").read_bytes()
    Path("cut.log").write_bytes(content[: int(len(content) * part)])
    assert "truncated" in _refused(cli, "cut.log")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(16, 3000), value=st.integers(0, 255))
def test_damaged_log_is_refused_or_reported(cli: Cli, position: int, value: int) -> None:
    write_logs()
    content = bytearray(Path("slow.log").read_bytes())
    changed = content[position % len(content)] != value
    content[position % len(content)] = value
    Path("damaged.log").write_bytes(content)
    done = cli("profile", "damaged.log")
    assert done.exit_code == (2 if changed else 0)


def _changed(result: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, name = path.split(".")
    node: Any = result
    for parent in parents:
        node = node[int(parent)] if parent.isdigit() else node[parent]
    node[name] = value
    return result


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("devices", {}),
        ("devices.0.kernels.0.calls", "many"),
        ("devices.0.measured.idle.launch_ns", None),
        ("devices.0.copies.0.direction", "sideways"),
        ("devices.0.lines.0.frame", ["f", "train.py"]),
    ],
)
def test_result_with_a_wrong_value_is_refused(cli: Cli, path: str, value: object) -> None:
    write_logs()
    cli("profile", "slow.log", "-o", "slow.json")
    result = _changed(json.loads(Path("slow.json").read_text()), path, value)
    Path("bad.json").write_text(json.dumps(result))
    assert "bad.json is damaged: devices" in _refused(cli, "bad.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("devices.0.kernels.0.site", 99),
        ("devices.0.steps.warm_up", 99),
        ("devices.0.measured.end_ns", -1),
        ("findings.0.process", 99),
        ("devices.0.kernels.0.name", "\x1b[31mred\n<script>"),
    ],
)
def test_result_that_contradicts_itself_is_refused_or_shown(
    cli: Cli, path: str, value: object
) -> None:
    write_logs()
    cli("profile", "slow.log", "-o", "slow.json")
    result = _changed(json.loads(Path("slow.json").read_text()), path, value)
    Path("bad.json").write_text(json.dumps(result))
    done = cli("profile", "bad.json")
    assert done.exit_code in (0, 2)
    assert "\x1b[31m" not in done.stdout


def test_log_with_extreme_times_is_reported(cli: Cli) -> None:
    program = training()
    program.now_ns = struct.unpack("<q", b"\xff" * 7 + b"\x3f")[0]
    program.kernel("late", 1 * US)
    program.write_log(Path("extreme.log"))
    assert cli("profile", "extreme.log").exit_code == 0


def test_profile_that_requires_a_gpu_says_why_it_fails(cli: Cli) -> None:
    Path("program.py").write_text(SIMULATED)

    done = cli("run", "--profile", "--require-gpu", "-o", "p.json", "program.py")

    assert done.exit_code == 1
    assert "✗ No work of a real GPU was recorded (--require-gpu)" in done.stderr
    assert "Events are missing" not in done.stderr
    assert json.loads(Path("p.json").read_text())["incomplete"]


def test_times_of_a_profile_are_reported_as_ignored_on_simulated_devices(cli: Cli) -> None:
    Path("program.py").write_text(SIMULATED)

    done = cli("run", "--profile", "--delay", "100", "--range", "train", "program.py")

    assert "--delay and --range have no effect on a simulated device" in done.stderr
    assert "no effect" not in cli("run", "--profile", "program.py").stderr


def test_profile_cannot_be_delayed_and_paused(cli: Cli) -> None:
    done = cli("run", "--profile", "--delay", "1", "--paused", "program.py")

    assert done.exit_code == 125
    assert "--delay and --paused exclude each other" in done.stderr


def test_summary_of_several_ranks_is_about_all_of_them(cli: Cli) -> None:
    done = cli("profile", Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog", "-q")

    title, idle, largest, last_rank, *_ = done.stdout.splitlines()
    assert title == "2 GPUs busy 35.1% to 40.9% of the time"
    assert idle == "i Idle 59.1% to 64.9%, mostly launch-bound (39.5% to 44.0%)."
    assert largest == "i Line with the most GPU time of both GPUs: ddp.py:28 in main, 71.2%."
    assert last_rank.startswith("i Rank 1, cuda:1 started last in 119 of 185 measured")
    assert last_rank.endswith("; rank 0, cuda:0 waited 26.5 ms in total for its start.")


def test_difference_of_simulated_profiles_says_so(cli: Cli) -> None:
    Path("program.py").write_text(SIMULATED)
    cli("run", "--profile", "-o", "p.json", "program.py")

    done = cli("profile", "p.json", "--diff", "p.json", "-q")

    assert done.stdout.startswith("Simulated: step unchanged: ")
    assert "\nstep, before " in done.stdout


def test_difference_says_which_profile_is_simulated(cli: Cli) -> None:
    Path("program.py").write_text(SIMULATED)
    cli("run", "--profile", "-o", "p.json", "program.py")
    example = Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog"

    simulated_first = cli("profile", example, "--diff", "p.json", "-q").stdout
    simulated_last = cli("profile", "p.json", "--diff", example, "-q").stdout

    assert simulated_first.startswith("Before simulated, after on a GPU: step")
    assert simulated_last.startswith("Before on a GPU, after simulated: step")


def test_copies_within_the_device_say_how_their_bytes_are_counted(cli: Cli) -> None:
    example = Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog"

    assert "each copied byte counts once" in " ".join(cli("profile", example).stdout.split())


def test_narrow_report_shows_how_busy_each_gpu_is(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    example = Path(__file__).parents[2] / "examples" / "profile" / "ddp.plog"
    report = cli("profile", example).stdout

    assert "Columns hidden at this width: collectives." in report
    assert "rank 0, cuda:0   40.9%" in report
    assert "Columns hidden at this width: copied." in report
