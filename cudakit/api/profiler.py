"""When a profiler collects.

``nsys --capture-range=cudaProfilerApi`` and ``ncu --profile-from-start off`` wait for it.
"""

from __future__ import annotations


def start() -> None:
    """Let the profiler that waits for it begin to collect; without one, nothing happens.

    Makes a context of the current device if there is none. Raises EnvironmentUnusable without a GPU.

    >>> import cudakit
    >>> cudakit.profiler.start()  # doctest: +SKIP
    >>> cudakit.profiler.stop()  # doctest: +SKIP
    """
    from cudakit.gpu.cuda.current import profiler_start

    profiler_start()


def stop() -> None:
    """Let the profiler stop collecting."""
    from cudakit.gpu.cuda.current import profiler_stop

    profiler_stop()
