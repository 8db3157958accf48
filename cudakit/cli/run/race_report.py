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
    """Return the report of races in every format; without GPU work the text is a line per reason."""
    from cudakit.core.sanitize.present import brief, report
    from cudakit.core.sanitize.present.coverage import is_empty, nothing_recorded
    from cudakit.render import html, sarif

    def page() -> Text:
        return html.render(report(result, top=0))

    def sarif_log() -> Text:
        return sarif.render(report(result, top=0), root=os.getcwd())

    def reasons() -> Text:
        sentences = (nothing_recorded(result), *result.incomplete, *result.notes)
        return "".join(f"cudakit: {printable(sentence)}\n" for sentence in sentences)

    is_unchecked = is_empty(result) and not result.races
    exports = {"html": page, "sarif": sarif_log} | ({"txt": reasons} if is_unchecked else {})
    return Report(
        result=result,
        document=lambda: report(result),
        exports=exports,
        brief=lambda: brief(result),
    )
