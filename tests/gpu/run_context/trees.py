"""Trees of files in place of the files of a system."""

from __future__ import annotations

from pathlib import Path

from cudakit.gpu.run_context.files import Files


def tree(root: Path, **contents: str) -> Files:
    """Write files below a root; ``__`` in a keyword is the separator of its path."""
    for path, text in contents.items():
        path = root / path.replace("__", "/").lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Files(root)
