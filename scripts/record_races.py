"""Run a program as ``cudakit run --sanitize`` does, and keep what was recorded beside what was found.

    python scripts/record_races.py -o races.json --log program.npz -- program.py ARGUMENT

The races are those of the log (``race_logs``), so that both are of one run. Ends as ``cudakit run`` does:
with the program's status, and where that is 0 with 1 for races.
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
    parser.add_argument("-o", "--output", type=Path, required=True, help="the races as JSON")
    parser.add_argument("--log", type=Path, required=True, help="what was recorded, as .npz")
    parser.add_argument("--accesses", choices=["exact", "arguments"])
    parser.add_argument("--most-bytes", type=int, help="leave out a log that is larger")
    parser.add_argument("words", nargs="+")
    return parser.parse_args()


def settings(python: str, accesses: Accesses | None, patches: Path) -> Settings:
    """Return what the agent is told; without a GPU simulated devices are recorded all the same."""
    found = preflight(python)
    if not isinstance(found, Ready):
        print(f"CUDA is not watched: {found.message}; {found.hint}", file=sys.stderr)
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
        print(f"no log is kept: it would take {size_bytes:,} bytes", file=sys.stderr)


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
    result = race_logs.analysed(chains, exit_status=code, notes=[each.text for each in notices])
    chosen.output.write_text(json.render(result), encoding="utf-8")
    return code or int(bool(findings(result)))


if __name__ == "__main__":
    sys.exit(main())
