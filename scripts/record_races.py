"""Run a program as ``cudakit run --sanitize`` does; write its races and a log of the recorded events.

    python scripts/record_races.py -o races.json --log program.npz -- program.py ARGUMENT

The races are computed from the log (``race_logs``). The exit code is that of ``cudakit run``: the program's,
or 1 for races if the program's is 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import race_logs

from cudakit.core.sanitize.report import findings
from cudakit.gpu.capture.device_patch import Accesses, add_device_patches
from cudakit.gpu.capture.preflight import Ready, preflight
from cudakit.render import json
from cudakit.run.child import shell_status
from cudakit.run.command import resolve
from cudakit.run.protocol import Notice, Settings
from cudakit.run.supervise import supervise


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON file for the races")
    parser.add_argument("--log", type=Path, required=True, help=".npz file for the recorded events")
    parser.add_argument("--accesses", choices=["exact", "arguments"])
    parser.add_argument("--most-bytes", type=int, help="delete a larger log")
    parser.add_argument("words", nargs="+")
    return parser.parse_args()


def settings(python: str, accesses: Accesses | None, patches: Path) -> Settings:
    """Return the settings of the agent; without a GPU it records simulated devices only."""
    found = preflight(python)
    if not isinstance(found, Ready):
        print(f"CUDA is not recorded: {found.message}; {found.hint}", file=sys.stderr)
        return Settings(sanitize=True)
    found, why_not = add_device_patches(found, accesses, patches)
    if why_not:
        print(why_not, file=sys.stderr)
    return Settings(sanitize=True, **found.settings())


def keep(log: Path, chains: Sequence[race_logs.Chain], most_bytes: int | None) -> None:
    """Write the log, unless it is too large."""
    race_logs.save(log, chains)
    size_bytes = log.stat().st_size
    if most_bytes is not None and size_bytes > most_bytes:
        log.unlink()
        print(f"the log is not kept: it has {size_bytes:,} bytes", file=sys.stderr)


def main() -> int:
    chosen = options()
    command = resolve(chosen.words, python=sys.executable)
    recording = race_logs.Recording(Path(chosen.words[0]).name)
    notices: list[Notice] = []
    with TemporaryDirectory() as patches:
        status = supervise(
            command,
            settings=settings(sys.executable, chosen.accesses, Path(patches)),
            consume=recording.add,
            notify=notices.append,
        )
    code = shell_status(status)
    chains = recording.chains()
    keep(chosen.log, chains, chosen.most_bytes)
    result = race_logs.analyzed(chains, exit_status=code, notes=[each.text for each in notices])
    chosen.output.write_text(json.render(result), encoding="utf-8")
    return code or int(bool(findings(result)))


if __name__ == "__main__":
    sys.exit(main())
