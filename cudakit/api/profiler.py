"""Start and stop a profiler that waits for the program.

Such profilers are ``cudakit run --profile --paused``, ``nsys --capture-range=cudaProfilerApi`` and
``ncu --profile-from-start off``.
"""

from __future__ import annotations


def start() -> None:
    """Start collection in the attached profiler; without a profiler this has no effect.

    Creates a context of the current device if there is none. Raises EnvironmentUnusable without a GPU.

    >>> import cudakit
    >>> cudakit.profiler.start()  # doctest: +SKIP
    >>> cudakit.profiler.stop()  # doctest: +SKIP
    """
    from cudakit.gpu.cuda.current import profiler_start

    profiler_start()


def stop() -> None:
    """Stop collection in the attached profiler."""
    from cudakit.gpu.cuda.current import profiler_stop

    profiler_stop()
