"""Creates a shell script that replaces ptxas."""

from __future__ import annotations

from pathlib import Path

from cudakit.record.installed import SearchPaths


def search_only(root: Path, **environment: str) -> SearchPaths:
    return SearchPaths(environment, (), root)


def fake_ptxas(path: Path, version: str, *, behaviour: str) -> Path:
    """Create a ptxas that prints a version, and runs ``behaviour`` for any other command line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo "Cuda compilation tools, release'
        f' {version}, V{version}.7";; *) {behaviour};; esac\n'
    )
    path.chmod(0o755)
    return path
