"""``python -m cudakit`` is the command ``cudakit``."""

from __future__ import annotations

import sys

from cudakit.cli import main

if __name__ == "__main__":
    sys.exit(main())
