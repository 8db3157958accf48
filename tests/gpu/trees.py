"""Creates directory trees that replace the files of a system."""

from __future__ import annotations

from pathlib import Path

from cudakit.gpu.host import Files


def tree(root: Path, **contents: str) -> Files:
    """Write files below a root. Keywords are paths, in which ``__`` stands for a slash."""
    for path, text in contents.items():
        path = root / path.replace("__", "/").lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Files(root)
