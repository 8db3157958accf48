"""The command ``cudakit``, and ``python -m cudakit``."""

from __future__ import annotations

import sys

_INTERRUPTED = 130  # same value as ExitCode.INTERRUPTED, which cannot be imported here


def main() -> int:
    """Run the command line of the process and return its exit code.

    The import is inside the function, so that Ctrl-C gives the same exit code during the import as later.
    """
    try:
        from cudakit.cli import main as command_line
    except KeyboardInterrupt:
        return _INTERRUPTED
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
