"""Which libraries ran the cases, in words."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.core.bench.result import CaseResult
from cudakit.document import Text, Value
from cudakit.units import format_bytes


def library_rows(cases: Sequence[CaseResult]) -> list[tuple[str, Value]]:
    """Name each library once, with what it was allowed; nothing where no case has one."""
    words = dict.fromkeys(_words(case) for case in cases if "library" in case.settings)
    return [("library", Text("; ".join(words)))] if words else []


def _words(case: CaseResult) -> str:
    settings = case.settings
    named = " ".join(str(settings[name]) for name in ("library", "version") if name in settings)
    allowed = settings.get("workspace_bytes")
    parts = [
        named,
        *([f"workspace up to {format_bytes(allowed)}"] if isinstance(allowed, int) else []),
        *([str(settings["asked"])] if settings.get("asked") else []),
    ]
    return ", ".join(parts)
