"""The profile of a program that ``run --profile`` records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cudakit.errors import UsageError
from cudakit.profile.activities import ActivityCollector
from cudakit.record.cupti import ProfileFiles, preflight_profile
from cudakit.record.protocol import ProfileSettings

if TYPE_CHECKING:
    from cudakit.profile.activities import Activities
    from cudakit.record.preflight import Refusal
    from cudakit.trace.spool import Batch


class ProfileMonitor:
    """Collects the activities of all processes of a program."""

    def __init__(self) -> None:
        self._collector = ActivityCollector()
        self._failure: Exception | None = None

    def on_batch(self, batch: Batch) -> None:
        """Keep the records of a batch."""
        if self._failure is None:
            try:
                self._collector.add(batch)
            except Exception as failure:  # noqa: BLE001 must not disturb the program
                self._failure = failure

    def activities(self) -> list[Activities]:
        """Return the activities of each process. Raises the first exception of ``on_batch``."""
        if self._failure:
            raise self._failure
        return self._collector.activities()


def check_profile_options(
    is_passed_by_option: Mapping[str, bool],
    *,
    has_profile: bool,
    has_sanitize: bool,
    has_driver_memory: bool,
) -> None:
    """Raise UsageError if --profile is missing, or combined with a recording that excludes it.

    ``is_passed_by_option`` maps each option that limits the time of a profile to whether the user passed
    the option.
    """
    options = [option for option, is_passed in is_passed_by_option.items() if is_passed]
    if options and not has_profile:
        verb = "needs" if len(options) == 1 else "need"
        raise UsageError(
            f"{' and '.join(options)} {verb} --profile",
            hint=f"add --profile, or remove {' and '.join(options)}",
        )
    if has_profile and has_sanitize:
        raise UsageError(
            "--profile and --sanitize exclude each other: --profile uses NVIDIA's CUPTI, --sanitize its"
            " Sanitizer API, and a process can use only one of them",
            hint="run the program twice: once with --sanitize, once with --profile",
        )
    if has_profile and has_driver_memory:
        raise UsageError(
            "--profile with --memory needs --no-driver: --profile uses NVIDIA's CUPTI, --memory its"
            " Sanitizer API, and a process can use only one of them",
            hint="add --no-driver, which records memory by the hooks of libraries only",
        )


def check_profile(
    python: str | None,
    *,
    has_device: Callable[[], bool],
    refuse: bool,
    add_note: Callable[[str], None],
) -> ProfileFiles | None:
    """Return the files that a profile uses; None with a note if the program runs without a profile.

    A program without a CUDA device is not refused. Raises EnvironmentUnusable with ``refuse``.
    """
    files_or_refusal: ProfileFiles | Refusal = preflight_profile(python)
    if isinstance(files_or_refusal, ProfileFiles):
        return files_or_refusal
    if has_device():
        if refuse:
            raise files_or_refusal.error()
        add_note(
            f"the program was not profiled: {files_or_refusal.message}; {files_or_refusal.hint}"
        )
    return None


def profile_settings(
    *, delay: float | None, duration: float | None, range_name: str | None, is_paused: bool
) -> ProfileSettings:
    """Return the settings of the agents from the options of the command line."""
    return ProfileSettings(
        delay=delay or 0.0, duration=duration or 0.0, range=range_name or "", paused=is_paused
    )
