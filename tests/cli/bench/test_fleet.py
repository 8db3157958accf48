"""``bench suite --ray`` on local Ray clusters with simulated GPUs, and on clusters that do not answer.

Every command is a process of its own: Ray keeps threads and sockets, and changes the environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from invocation import Cli

from cudakit.cli.bench.fleet import describe_host, measure_gpu

SLOW_GPU = 2  # Index of the GPU of sim:t4x4-slow that has slow memory.
END_TIMEOUT_S = 200
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "COLUMNS": "100",
}

pytestmark = pytest.mark.timeout(400)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cudakit", "bench", "suite", "--quick", *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Return the exit code and the output of a command."""
    process = start(*arguments)
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    return process.returncode, stdout, stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def ray_node(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Ray node without GPUs, and end all of its processes at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1",
         "--num-gpus=0", "--object-store-memory=80000000", *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        process.wait(END_TIMEOUT_S)


@contextmanager
def ray_cluster(port: int, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Ray cluster of one host, whose head listens on a port; yield the process of the head."""
    # Paths of sockets are short (unix(7)), those of pytest's directories are not.
    link = Path("/tmp") / f"cudakit-test-ray-{os.getpid()}-{port}"  # noqa: S108
    directory.mkdir()
    link.symlink_to(directory)
    try:
        with ray_node(
            "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={link}"
        ) as process:
            deadline_s = time.monotonic() + END_TIMEOUT_S
            while not is_listening(port) and time.monotonic() < deadline_s:
                assert process.poll() is None
                time.sleep(0.1)
            yield process
    finally:
        link.unlink()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a Ray cluster of one host."""
    port = free_port()
    with ray_cluster(port, tmp_path_factory.mktemp("ray") / "head"):
        yield f"127.0.0.1:{port}"


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def wait_for_files(directory: Path, pattern: str, count: int = 1) -> list[Path]:
    """Return the files of a pattern when there are enough of them."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while len(files := sorted(directory.glob(pattern))) < count:
        assert time.monotonic() < deadline_s, f"{pattern} did not appear"
        time.sleep(0.05)
    return files


def findings(document: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Return the kind and the GPU of each finding."""
    return [(finding["kind"], finding["subject"]["gpu"]) for finding in document["findings"]]


def test_slow_gpu_of_a_local_cluster_is_named(tmp_path: Path) -> None:
    results = tmp_path / "results"
    code, stdout, stderr = run(
        "--ray", "local", "--gpu", "sim:t4x4-slow", "--results", results,
        "-o", tmp_path / "fleet.json", "-o", tmp_path / "fleet.html", "-o", "-",
    )  # fmt: skip

    assert code == 1, stderr
    assert stdout.splitlines()[0] == "Simulated: bench suite, 4 GPUs on 1 host"
    assert f"GPU {SLOW_GPU} (memory triad: " in stdout
    assert "the memory clock is 3500 MHz, that of most peers 5001 MHz" in stdout
    assert stderr.splitlines()[0] == f"Writing results to {results}"
    document = json.loads((tmp_path / "fleet.json").read_text())
    assert document["schema"] == "cudakit.fleet/1"
    assert findings(document) == [("slower", SLOW_GPU)]
    (host,) = document["hosts"]
    assert all(gpu["suite"]["bench"]["results"][0]["samples_s"] for gpu in host["gpus"])
    assert len(list(results.glob("*/gpu*.json"))) == 4
    assert not list(Path("/tmp").glob("cudakit-ray-*/session_*/sockets/raylet"))  # noqa: S108


def test_results_of_a_killed_driver_are_reported_and_not_measured_again(
    cluster: str, tmp_path: Path, cli: Cli
) -> None:
    arguments = ("--ray", cluster, "--gpu", "sim:t4x4-slow", "--results", tmp_path, "--json")
    process = start(*arguments)
    (first_file,) = wait_for_files(tmp_path, "*/gpu0.json")
    process.kill()
    process.communicate(timeout=END_TIMEOUT_S)
    first_time_ns = first_file.stat().st_mtime_ns

    partial_run = cli("bench", "suite", "--results", tmp_path)
    assert partial_run.exit_code == 0
    assert f"Not measured: {first_file.parent.name} GPU " in partial_run.stdout
    code, stdout, stderr = run(*arguments)
    assert code == 1, stderr
    document = json.loads(stdout)
    assert document["complete"]
    assert findings(document) == [("slower", SLOW_GPU)]
    assert first_file.stat().st_mtime_ns == first_time_ns
    comparison = cli("bench", "compare", first_file, first_file.with_name("gpu1.json"))
    assert comparison.exit_code == 0, comparison.stderr


def test_interrupt_gives_a_partial_report(cluster: str, tmp_path: Path) -> None:
    process = start("--ray", cluster, "--gpu", "sim:t4x4-slow", "--results", tmp_path)
    (first_file,) = wait_for_files(tmp_path, "*/gpu0.json")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)

    assert process.returncode == 130, stderr
    assert f"Not measured: {first_file.parent.name} GPU " in stdout
    assert "Traceback" not in stderr


def suite_processes() -> list[int]:
    """Return the ids of the processes in which Ray runs a suite."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title = path.read_bytes()
        except OSError:
            continue  # The process has ended.
        if title.startswith(b"ray::measure_gpu"):
            pids.append(int(path.parent.name))
    return pids


def ancestors(pid: int) -> list[int]:
    """Return the ids of the process that started a process, of the one that started that, and so on."""
    pids = []
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
        pids.append(pid)
    return pids


def kill_programs(node: subprocess.Popen[bytes], name: str) -> None:
    """Kill the processes of a Ray node that run a program.

    The program "raylet" manages the host, and "gcs_server" on the head manages the cluster.
    """
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            program = path.read_bytes().partition(b"\0")[0]
        except OSError:
            continue  # The process has ended.
        pid = int(path.parent.name)
        if program.endswith(f"/{name}".encode()) and node.pid in ancestors(pid):
            os.kill(pid, signal.SIGKILL)


def test_host_and_process_that_die_are_findings_beside_the_results_of_others(
    cluster: str, tmp_path: Path
) -> None:
    """Add a host whose first suite process is killed twice, and that leaves at its second GPU."""
    with ray_node(f"--address={cluster}") as second_host:
        wait_for_nodes(cluster, 2)
        process = start(
            "--ray", cluster, "--gpu", "sim:t4x4-slow", "--results", tmp_path / "results", "--json"
        )
        seen_pids: set[int] = set()
        while process.poll() is None and second_host.poll() is None:
            for pid in suite_processes():
                if pid not in seen_pids and second_host.pid in ancestors(pid):
                    seen_pids.add(pid)
                    if len(seen_pids) <= 2:  # The first attempt, and Ray's second one.
                        os.kill(pid, signal.SIGKILL)
                    else:
                        os.kill(pid, signal.SIGSTOP)  # GPU 1 must not end before its host does.
                        kill_programs(second_host, "raylet")
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)

    assert process.returncode == 1, stderr
    assert stderr == f"Writing results to {tmp_path / 'results'}\n"
    document = json.loads(stdout)
    assert sorted(findings(document), key=str) == [
        ("failed", 0),
        ("failed", None),
        ("slower", SLOW_GPU),
    ]
    failures = [finding for finding in document["findings"] if finding["kind"] == "failed"]
    texts = {failure["subject"]["gpu"]: failure["text"] for failure in failures}
    assert texts[0] == "the process died 2 times"
    assert texts[None] == "the host left the Ray cluster (at GPU 1)"
    suites = [gpu["suite"] for host in document["hosts"] for gpu in host["gpus"]]
    assert sum(suite is not None for suite in suites) == 4


def wait_for_nodes(address: str, count: int) -> None:
    """Wait until a Ray cluster has a number of nodes."""
    program = (
        "import ray, sys, time\n"
        "ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')\n"
        "while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]): time.sleep(0.1)\n"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", program, address, str(count)],
        env=ENVIRONMENT,
        timeout=END_TIMEOUT_S,
        check=True,
        stderr=subprocess.DEVNULL,
    )


def test_lost_cluster_is_an_error_within_seconds_that_keeps_the_results(
    tmp_path: Path, cli: Cli
) -> None:
    port, results = free_port(), tmp_path / "results"
    with ray_cluster(port, tmp_path / "ray") as head:
        process = start(
            "--ray", f"127.0.0.1:{port}", "--gpu", "sim:t4x4-slow", "--results", results
        )
        wait_for_files(results, "*/gpu0.json")
        kill_programs(head, "gcs_server")
        begin_s = time.monotonic()
        stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)

    assert (process.returncode, stdout) == (3, "")
    assert time.monotonic() - begin_s < 100
    assert "cudakit: error: the connection to the Ray cluster was lost: " in stderr
    assert stderr.endswith("hint: cudakit bench suite --results DIR reports the results so far\n")
    report = cli("bench", "suite", "--results", results)
    assert report.exit_code == 0
    assert report.stdout.startswith("Simulated: bench suite, ")


def test_cluster_without_gpus_is_an_error(cluster: str, tmp_path: Path) -> None:
    code, stdout, stderr = run("--ray", cluster, "--results", tmp_path / "results")

    assert (code, stdout) == (3, "")
    assert "the Ray cluster has no GPU: 1 host without one" in stderr
    assert "--num-gpus" in stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        ("127.0.0.1:1", 3, "the Ray cluster 127.0.0.1:1 does not answer: Connection refused"),
        ("host.invalid:6379", 3, "the Ray cluster host.invalid:6379 does not answer: "),
        ("localhost", 2, "'localhost' is not an address of a Ray cluster"),
        ("localhost:high", 2, "'localhost:high' is not an address of a Ray cluster"),
        ("127.0.0.1:99999", 3, "the Ray cluster 127.0.0.1:99999 does not answer: "),
        ("ray://head:10001", 2, "ray://head:10001 is an address of Ray Client"),
    ],
)
def test_address_without_cluster_is_one_error(address: str, code: int, message: str) -> None:
    begin_s = time.monotonic()
    exit_code, stdout, stderr = run("--ray", address, "--gpu", "sim")

    assert (exit_code, stdout) == (code, "")
    assert stderr.startswith(f"cudakit: error: {message}")
    assert stderr.splitlines()[1].startswith("hint: ")
    assert len(stderr.splitlines()) == 2
    assert time.monotonic() - begin_s < 100


def test_server_that_is_no_ray_cluster_is_an_error_within_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, stdout, stderr = run("--ray", address, "--gpu", "sim", "--ray-timeout", "2")

    assert (code, stdout) == (3, "")
    assert f"the Ray cluster {address} does not answer within 2 s" in stderr


def test_missing_ray_names_the_extra() -> None:
    program = (
        "import sys\n"
        "sys.modules['ray'] = None\n"
        "from cudakit.cli import main\n"
        "sys.exit(main(['bench', 'suite', '--ray', 'local', '--gpu', 'sim']))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "cudakit: error: ray is not installed, and --ray needs it",
        "hint: pip install 'cudakit[fleet]'",
    ]


def test_unknown_simulated_model_is_an_error_of_the_command(cli: Cli, tmp_path: Path) -> None:
    run = cli("bench", "suite", "--ray", "local", "--gpu", "sim:h900", "--results", tmp_path)

    assert run.exit_code == 2
    assert "no simulated GPU 'h900'" in run.stderr


def measured_document(uuid: str) -> dict[str, Any]:
    """Return the document of the suite on GPU 0 by index, of a host with four simulated GPUs, by UUID."""
    start_text, document = measure_gpu(0, uuid, "sim:t4x4-slow", True, ("cudakit",))
    assert start_text == ""
    return dict(json.loads(document))


def test_gpu_is_chosen_by_its_uuid_whatever_its_index_in_the_task() -> None:
    uuid = "GPU-00000002-5eed-4c0d-a517-000000000002"

    (first_case, *_) = measured_document(uuid)["bench"]["results"]
    assert first_case["environment"]["uuid"] == uuid


def test_gpu_that_ray_did_not_give_to_the_task_is_an_error() -> None:
    error = measured_document("GPU-other")["error"]

    assert error["message"].startswith("Ray gave the task other GPUs than GPU-other: GPU-00000000-")
    assert "CUDA_VISIBLE_DEVICES" in error["hint"]


def test_facts_of_a_host_have_the_uuids_of_its_gpus() -> None:
    (text,) = describe_host("sim:t4x4-slow", True, ("cudakit",))

    uuids = json.loads(text)["gpu_uuids"]
    assert len(set(uuids)) == 4


def test_ray_is_not_imported_without_the_option() -> None:
    program = (
        "import sys\n"
        "from cudakit.cli import main\n"
        "code = main(['bench', 'suite', '--results', 'none'])\n"
        "assert 'ray' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stderr.startswith("cudakit: error: none does not exist")


@pytest.mark.parametrize("suffix", ["nvbench.json", "pdf"])
def test_format_that_a_fleet_lacks_is_refused_first(cli: Cli, tmp_path: Path, suffix: str) -> None:
    run = cli("bench", "suite", "--ray", "local", "-o", tmp_path / f"fleet.{suffix}")

    assert run.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_format_of_a_single_gpu_is_refused_for_a_fleet(cli: Cli, tmp_path: Path) -> None:
    run = cli("bench", "suite", "--results", tmp_path, "-o", "fleet.nvbench.json")

    assert run.exit_code == 2
    assert (
        "cannot write fleet.nvbench.json: this report has no format with this suffix" in run.stderr
    )
