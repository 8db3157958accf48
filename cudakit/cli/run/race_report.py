"""The report of ``run --sanitize`` and ``sanitize``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cudakit.cli.failure import ExitCode
from cudakit.cli.output import printable
from cudakit.cli.report import Report, Text

if TYPE_CHECKING:
    from cudakit.core.sanitize.result import SanitizeResult


def exit_code(result: SanitizeResult) -> ExitCode:
    """Return 1 for races or an incomplete recording."""
    from cudakit.core.sanitize.report import findings

    return ExitCode.FINDINGS if findings(result) or result.incomplete else ExitCode.OK


def race_report(result: SanitizeResult) -> Report:
    """Return the report of races in every format."""
    from cudakit.core.sanitize.present import report
    from cudakit.render import html, sarif

    def page() -> Text:
        return html.render(report(result, top=0))

    def log() -> Text:
        return sarif.render(report(result, top=0), root=os.getcwd())

    def short() -> Text:
        return "".join(f"cudakit: {printable(line)}\n" for line in _brief(result))

    exports = {"html": page, "sarif": log} | ({"txt": short} if _is_empty(result) else {})
    return Report(
        result=result,
        document=lambda: report(result),
        exports=exports,
        brief=lambda: _brief(result),
    )


def _brief(result: SanitizeResult) -> tuple[str, ...]:
    """Return the verdict, the reasons why the recording is incomplete, the races and the notes."""
    from cudakit.core.sanitize.present import title
    from cudakit.core.sanitize.present.coverage import nothing_recorded

    verdict = nothing_recorded(result) if _is_empty(result) else title(result)
    races = (race.sentence for race in result.races)
    return (verdict, *result.incomplete, *races, *result.notes)


def _is_empty(result: SanitizeResult) -> bool:
    from cudakit.core.sanitize.present.coverage import is_empty

    return is_empty(result) and not result.races
