"""``cudakit explain``: explain error codes, Xid numbers, checks and environment variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cudakit.cli.failure import ExitCode
from cudakit.cli.options import Command, Value, output_options
from cudakit.cli.output import COMMON_FORMATS, OutputOptions, Report, open_outputs

if TYPE_CHECKING:
    from cudakit.devices.explain import Topic


def explained_terms() -> tuple[str, ...]:
    """Return the names of all topics, for shell completion."""
    from cudakit.devices.explain import topic_names

    return topic_names(_cuda_errors())


@click.command(cls=Command)
@click.argument("terms", metavar="TERM...", nargs=-1, required=True, type=Value(explained_terms))
@output_options(COMMON_FORMATS)
def explain(*, terms: tuple[str, ...], output: OutputOptions) -> int:
    """Explain error codes, Xids, checks and environment variables: what happened, why, what to do.

    TERM is a CUDA error (700, CUDA_ERROR_ILLEGAL_ADDRESS, cudaErrorIllegalAddress), a status of cuBLAS,
    cuDNN or NCCL, an Xid number of the kernel log, a check of cudakit doctor, or an environment variable of
    CUDA, its libraries or frameworks, or of cudakit.

    \b
    cudakit explain 700
    cudakit explain 700 719 Xid 79
    cudakit explain CK012
    cudakit explain NCCL_P2P_DISABLE
    """
    return explain_terms(terms, output)


def explain_terms(
    words: tuple[str, ...], output: OutputOptions, *, for_doctor: bool = False
) -> int:
    """Write the explanations of terms; ``for_doctor`` keeps the JSON form of ``doctor --explain``.

    Raises UsageError, with similar names, for an unknown term.
    """
    from cudakit.devices.explain import check_explanation, explain, report, sentence

    explanation = explain(words, _cuda_errors())
    result = (check_explanation(explanation) if for_doctor else None) or explanation
    with open_outputs(output) as outputs:
        sentences = [sentence(topic) for topic in explanation.topics]
        outputs.write(
            Report(
                result=result,
                document=lambda: report(explanation),
                brief_sentences=lambda: sentences,
            )
        )
    return ExitCode.OK


def _cuda_errors() -> list[Topic]:
    from cudakit.devices.explain import Topic
    from cudakit.gpu.driver_errors import known_errors

    return [
        Topic(
            kind="CUDA error",
            name=error.name,
            code=error.code,
            other_names=(error.runtime,) if error.runtime else (),
            meaning=error.meaning,
            causes=error.causes,
            action=error.remedy,
            source="CUDA Driver API and CUDA Runtime API, data types",
        )
        for error in known_errors().values()
    ]
