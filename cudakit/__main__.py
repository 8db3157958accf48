"""The command ``cudakit``, and ``python -m cudakit``."""

from __future__ import annotations

import sys

_INTERRUPTED = 130  # ExitCode.INTERRUPTED, which an interrupted import cannot provide


def main() -> int:
    """Run the command line of the process and return its exit code.

    The import is inside of the function, so that Ctrl-C during the import ends the command as it does later.
    """
    try:
        from cudakit.cli import main as command_line
    except KeyboardInterrupt:
        return _INTERRUPTED
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
