"""Run programs that run out of memory on a GPU, and check the cause and the settings that memviz reports.

    python scripts/check_oom.py                          # all programs, one at a time
    python scripts/check_oom.py 'kept_*' --jobs 3        # selected programs; start three, run one at a time
    python scripts/check_oom.py --gpus 2 --json FILE

Each program of scripts/oom_programs.py and examples/memory runs out of memory under `cudakit run --memory`.
The first cause in the report of memviz must be the known cause of the program. Then the program runs with
each recommended setting, and must end without an error. Exits with 1 if fewer than nine of ten causes are
right, or if a recommended setting does not help. --keep FOLDER keeps the snapshots.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SETTING = re.compile(r"PYTORCH_CUDA_ALLOC_CONF=(\S+)")
TIMEOUT_S = 120
MIN_SHARE_RIGHT = 0.9

# The known cause of each program, as its id in the JSON of memviz.
CAUSES = {
    "kv_cache": "growth",
    "retained_graph": "retained",
    "varying_lengths": "fragmentation",
    "kept_outputs": "retained",
    "hidden_state_with_graph": "retained",
    "kept_exceptions": "retained",
    "hooks_keep_activations": "retained",
    "graph_for_every_shape": "retained",
    "gradients_of_every_step": "retained",
    "longer_sequences": "growth",
    "search_for_batch_size": "growth",
    "evaluation_batch": "one_off_peak",
    "attention_of_long_prompt": "one_off_peak",
    "copy_for_checkpoint": "one_off_peak",
    "first_optimizer_step": "one_off_peak",
    "all_distances": "request_too_large",
    "fraction_of_process": "process_limit",
    "another_process": "other_processes",
    "cupy_beside_torch": "other_processes",
    "small_results_between_activations": "fragmentation",
    "blocks_of_another_stream": "fragmentation",
    "replay_buffer_of_varying_sizes": "fragmentation",
}


@dataclass
class Outcome:
    """The expected and the reported cause of a program's failure, and the results of recommended settings."""

    program: str
    expected: str
    cause: str = ""
    sentence: str = ""
    # Key: a recommended setting. Value: whether the program ended without an error with this setting.
    settings: dict[str, bool] = field(default_factory=dict)
    error: str = ""

    @property
    def is_right(self) -> bool:
        """Whether memviz reported the expected cause."""
        return not self.error and self.cause == self.expected


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the Python interpreter with the given arguments."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def check(program: str, folder: Path, environment: dict[str, str]) -> Outcome:
    """Run a program until it fails, analyze its snapshot, and try the recommended settings."""
    outcome = Outcome(program, CAUSES[program])
    snapshot = folder / f"{program}.pkl.gz"
    program_command = [str(ROOT / "scripts/oom_programs.py"), program]
    try:
        recording = ["-m", "cudakit", "run", "--memory", "-q", "-f", "--snapshot", str(snapshot)]
        failed_run = run([*recording, *program_command], environment)
        if "OutOfMemoryError" not in failed_run.stderr:
            outcome.error = (
                f"no OutOfMemoryError: {failed_run.stdout[-200:]}{failed_run.stderr[-400:]}"
            )
            return outcome
        report = run(["-m", "cudakit", "memviz", str(snapshot), "--json"], environment)
        devices = json.loads(report.stdout)["devices"]
        failure = [oom for device in devices for oom in device["ooms"]][-1]
        outcome.cause, outcome.sentence = failure["causes"][0]["id"], failure["sentence"]
        for setting in _SETTING.findall("\n".join(failure["remedies"])):
            repeated_run = run(program_command, environment | {"PYTORCH_CUDA_ALLOC_CONF": setting})
            outcome.settings[setting] = repeated_run.returncode == 0
    except (subprocess.TimeoutExpired, json.JSONDecodeError, KeyError, LookupError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:400]
    return outcome


def check_all(programs: list[str], folder: Path, gpus: int, jobs: int) -> Iterator[Outcome]:
    """Check programs, several at a time on each GPU."""
    # A lock lets one program at a time run on a GPU.
    environments = [
        dict(os.environ)
        | {
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "OOM_PROGRAMS_LOCK": str(Path(tempfile.gettempdir()) / f"cudakit-oom-{gpu}.lock"),
        }
        for gpu in range(gpus)
    ]
    with ThreadPoolExecutor(jobs * gpus) as pool:
        yield from pool.map(
            lambda pair: check(pair[1], folder, environments[pair[0] % gpus]), enumerate(programs)
        )


def report(checked: Iterable[Outcome]) -> tuple[int, list[Outcome]]:
    """Print a line for each program; return the exit code and the outcomes."""
    outcomes = []
    for outcome in checked:
        outcomes.append(outcome)
        mark = "ok   " if outcome.is_right else "WRONG"
        print(
            f"{mark} {outcome.program:34} {outcome.expected:18} {outcome.error or outcome.sentence}"
        )
        if not outcome.is_right and outcome.cause:
            print(f"      memviz: {outcome.cause}")
        for setting, helped in outcome.settings.items():
            print(f"      {setting}: {'the program ended' if helped else 'FAILED AGAIN'}")
    right = sum(outcome.is_right for outcome in outcomes)
    setting_helped = [helped for outcome in outcomes for helped in outcome.settings.values()]
    print(
        f"{right} of {len(outcomes)} causes right; "
        f"{sum(setting_helped)} of {len(setting_helped)} settings helped"
    )
    return (0 if right >= MIN_SHARE_RIGHT * len(outcomes) and all(setting_helped) else 1), outcomes


def main() -> int:
    """Check the programs that the command line names; without names, all programs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=["*"], help="names of programs, or patterns such as 'kept_*'"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="programs to start at a time for each GPU"
    )
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs to use")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--keep", type=Path, help="keep the snapshots in this folder")
    options = parser.parse_args()
    programs = [
        program
        for program in CAUSES
        if any(fnmatch.fnmatch(program, pattern) for pattern in options.names)
    ]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="cudakit-oom-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        exit_code, outcomes = report(check_all(programs, folder, options.gpus, options.jobs))
    finally:
        if options.keep is None:
            shutil.rmtree(folder)
    if options.json:
        options.json.write_text(
            json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"
        )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
