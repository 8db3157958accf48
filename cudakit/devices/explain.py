"""Explain error codes, Xid numbers, checks and environment variables: ``cudakit explain``."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from typing import ClassVar

from cudakit.devices.doctor.checks import SELF_TEST, checks_by_id, id_ranges
from cudakit.devices.doctor.system import CATALOG_URL, known_xids
from cudakit.devices.doctor.variables import known_variables
from cudakit.errors import UsageError, one_of
from cudakit.report.document import Document, Facts, Node, Section, Text

# An Xid in upper case: "XID 79", "XID79" or "XID:79".
_XID_PATTERN = re.compile(r"XID\W*0*(\d+)")
# A term of several words, such as "Xid 79" or "CUDA error 700", or one word of the command line.
_TERM_PATTERN = re.compile(
    r"(?:xid\W*|cuda\s+error\s+|(?:cublas|cudnn|nccl)\s+status\s+)\d+(?!\S)|[^\n]+", re.IGNORECASE
)
_CHECK_PATTERN = re.compile(r"CK0*(\d+)")
_ERROR_NAME_PREFIXES = ("CUDA_ERROR_", "CUDAERROR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """The explanation of one error, Xid, check, library status or environment variable."""

    kind: (
        str  # kind: "CUDA error", "Xid", "check", "environment variable", "cuBLAS status" and so on
    )
    name: str  # name, such as "CUDA_ERROR_ILLEGAL_ADDRESS", "Xid 79" or "CK012"
    code: int | None = None  # number of the error, Xid or check; null for an environment variable
    other_names: tuple[str, ...] = ()  # other names of the term
    meaning: str  # meaning of an error, statement that a check tests, or effect of a variable
    explanation: str = ""  # background in paragraphs; empty if there is none
    causes: str = ""  # typical causes; empty if there are none
    action: str = ""  # recommended action; empty if there is no general one
    source: str  # documentation or source file of the explanation

    @property
    def names(self) -> tuple[str, ...]:
        """All names in upper case."""
        return tuple(name.upper() for name in (self.name, *self.other_names))


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanations of the terms of one command."""

    schema: ClassVar[str] = "cudakit.explain/1"
    asked: str  # terms of the command, separated by spaces
    topics: tuple[Topic, ...]  # topics of the first term, then those of the second term, and so on


@dataclass(frozen=True, slots=True)
class CheckExplanation:
    """The explanation of a check, as ``doctor --explain ID --json`` writes it."""

    schema: ClassVar[str] = "cudakit.doctor.explanation/1"
    id: str  # id of the check, such as CK005
    title: str  # the statement that holds if the check passes
    explanation: str  # background in paragraphs


def explain(words: Sequence[str], cuda_errors: Sequence[Topic]) -> Explanation:
    """Return the topics that terms name: a name, ``700``, ``Xid 79`` or ``CK012``, in any case.

    ``words`` are those of the command line: "Xid", "79", "700" are two terms. A plain number is a CUDA error,
    an Xid, or both. Raises UsageError, with similar names, for a term that no topic matches.
    """
    topics = [*_all_topics(cuda_errors)]
    terms = [" ".join(term.split()) for term in _TERM_PATTERN.findall("\n".join(words))] or [""]
    topics_by_term = {
        term: [topic for topic in topics if _matches_topic(term, topic)] for term in terms
    }
    unknown_terms = [term for term, topics_of_term in topics_by_term.items() if not topics_of_term]
    if unknown_terms:
        # If no word is a term, the words are probably one message.
        term = " ".join(terms) if unknown_terms == terms else unknown_terms[0]
        raise UsageError(f"no explanation for {term!r}", hint=_suggestion(term.upper(), topics))
    distinct_topics = dict.fromkeys(itertools.chain.from_iterable(topics_by_term.values()))
    return Explanation(" ".join(terms), tuple(distinct_topics))


def check_explanation(result: Explanation) -> CheckExplanation | None:
    """Return the explanation that ``doctor --explain`` writes if the only topic is a check, else None."""
    (topic, *other_topics) = result.topics
    if other_topics or topic.kind != "check":
        return None
    return CheckExplanation(topic.name, topic.meaning, topic.explanation)


def topic_names(cuda_errors: Sequence[Topic]) -> tuple[str, ...]:
    """Return the names of all topics, for shell completion."""
    return tuple(topic.name for topic in _all_topics(cuda_errors))


def _matches_topic(spelling: str, topic: Topic) -> bool:
    term = spelling.upper()
    if term.isdecimal():
        return topic.code == int(term) and topic.kind in ("CUDA error", "Xid")
    xid_match, check_match = _XID_PATTERN.fullmatch(term), _CHECK_PATTERN.fullmatch(term)
    if xid_match or check_match:
        term_number = int((xid_match or check_match or ["", "0"])[1])
        return topic.code == term_number and topic.kind == ("Xid" if xid_match else "check")
    spellings = {f"{prefix}{term}" for prefix in ("", *_ERROR_NAME_PREFIXES)}
    return not spellings.isdisjoint(topic.names) or term == f"{topic.kind} {topic.code}".upper()


_MAX_SUGGESTIONS = 5  # maximum number of names that a hint suggests
_MAX_SIMILAR_NAMES = 30  # maximum number of similar names with which a hint is useful
_ABBREVIATIONS = {"OOM": "OUT_OF_MEMORY"}


def _suggestion(spelling: str, topics: Sequence[Topic]) -> str:
    """Return a hint for an unknown term in upper case."""
    if _CHECK_PATTERN.fullmatch(spelling):
        return f"checks are {id_ranges()}"
    if _XID_PATTERN.fullmatch(spelling):
        return f"NVIDIA's catalog may have it: {CATALOG_URL}"
    term = "_".join(_ABBREVIATIONS.get(word, word) for word in spelling.split("_"))
    similar_names = (
        _similar_names(term, topics)
        or [topic.name for topic in topics if term and topic.name.upper().startswith(term)]
        or _topics_with_words(term, topics)
    )
    if 0 < len(similar_names) <= _MAX_SUGGESTIONS + 1:
        return f"did you mean {one_of(similar_names)}?"
    if 0 < len(similar_names) <= _MAX_SIMILAR_NAMES:
        omitted_count = len(similar_names) - _MAX_SUGGESTIONS
        return f"did you mean {', '.join(similar_names[:_MAX_SUGGESTIONS])} or one of {omitted_count} others?"
    return (
        "TERM is a CUDA error (700 or CUDA_ERROR_ILLEGAL_ADDRESS), a status (ncclSystemError), an Xid "
        "(Xid 79), a check (CK012) or an environment variable of CUDA, its libraries or frameworks, or of "
        "cudakit"
    )


def _similar_names(term: str, topics: Sequence[Topic]) -> list[str]:
    """Return the names of at most three topics whose spelling differs from the term in few characters."""
    topic_by_spelling = {name: topic for topic in topics for name in topic.names}
    # A term such as ILEGAL_ADDRESS may lack the prefix of CUDA's errors.
    topic_by_spelling |= {
        name.removeprefix("CUDA_ERROR_"): topic for name, topic in topic_by_spelling.items()
    }
    similar_spellings = get_close_matches(term, topic_by_spelling, n=3, cutoff=0.75)
    return list(dict.fromkeys(topic_by_spelling[spelling].name for spelling in similar_spellings))


def _topics_with_words(term: str, topics: Sequence[Topic]) -> list[str]:
    """Return the names of the topics that match a term of several words.

    Each word of the term must be the beginning of a word of the topic's name or meaning. A number in the term
    must be the topic's code.
    """
    starts, numbers = re.findall(r"[A-Z][A-Z0-9]{2,}", term), re.findall(r"\b\d+", term)
    if not (starts or numbers):
        return []

    def contains_words(topic: Topic) -> bool:
        words = re.findall(r"[A-Z0-9]+", f"{topic.name} {topic.meaning}".upper())
        has_words = all(any(word.startswith(start) for word in words) for start in starts)
        return has_words and all(int(number) == topic.code for number in numbers)

    return [topic.name for topic in topics if contains_words(topic)]


# --- topics ----------------------------------------------------------------------------------------


# The causes of Xids, by their origin in the table.
_XID_CAUSES = {
    "program": "an error in a program",
    "hardware": "a hardware or driver problem",
    "notice": "",
}
# Owners of variables whose library, as doctor names it, is no product.
_VARIABLE_OWNERS = {"CUDA toolkit": "the CUDA toolkit", "Container": "NVIDIA's containers"}


def _all_topics(cuda_errors: Sequence[Topic]) -> Iterator[Topic]:
    yield from cuda_errors
    for number, xid in known_xids().items():
        yield Topic(
            kind="Xid",
            name=f"Xid {number}",
            code=number,
            meaning=xid.meaning,
            causes=_XID_CAUSES[xid.origin],
            action=xid.action,
            source=f"Xid Errors, {CATALOG_URL}",
        )
    self_test_ids = {check.id for checks in SELF_TEST.values() for check in checks}
    for check in checks_by_id().values():
        options = f"--only {check.id}{' --deep' if check.id in self_test_ids else ''}"
        yield Topic(
            kind="check",
            name=check.id,
            code=int(check.id.removeprefix("CK")),
            meaning=check.title,
            explanation=check.explanation,
            action=f"cudakit doctor {options} prints what to do if the check fails here",
            source="cudakit",
        )
    table = files("cudakit.devices").joinpath("statuses.csv").read_text("utf-8")
    for row in csv.DictReader(table.splitlines()):
        yield Topic(
            kind=f"{row['library']} status",
            name=row["name"],
            code=int(row["code"]),
            meaning=row["meaning"],
            causes=row["causes"],
            action=row["action"],
            source=f"{row['library']} documentation, status codes",
        )
    for name, variable in known_variables().items():
        owner = _VARIABLE_OWNERS.get(variable.library, variable.library)
        warning = f"unset it unless you need it; {variable.check} warns about it"
        yield Topic(
            kind=f"environment variable of {owner}",
            name=name,
            meaning=variable.effect,
            action=warning if variable.check else "",
            source=variable.source,
        )


# --- the report ------------------------------------------------------------------------------------


def report(result: Explanation) -> Document:
    """Return the explanations; several topics get a section each."""
    if len(result.topics) == 1:
        return Document(_title(result.topics[0]), tuple(_nodes(result.topics[0])))
    sections = tuple(Section(_title(topic), tuple(_nodes(topic))) for topic in result.topics)
    count_text = f"{len(result.topics)} explanations"
    is_single = " " not in result.asked
    return Document(f"{result.asked}: {count_text}" if is_single else count_text, sections)


def sentence(topic: Topic) -> str:
    """Return the name and meaning of a topic in one line."""
    if topic.kind == "check":
        return f"{topic.name} checks that {topic.meaning}"
    # The effect of a variable may begin with the value that has the effect, as in "1: kernels are traced".
    separator = "=" if re.match(r"\w+: ", topic.meaning) and _is_variable(topic) else ": "
    return f"{topic.name}{separator}{topic.meaning}"


def _title(topic: Topic) -> str:
    if topic.kind == "check":
        return sentence(topic)
    code_text = f" {topic.code}" if topic.code is not None and topic.kind != "Xid" else ""
    return topic.name if topic.kind == "Xid" else f"{topic.name} ({topic.kind}{code_text})"


def _nodes(topic: Topic) -> Iterator[Node]:
    purpose, _, background = topic.explanation.partition("\n\n")
    meaning_label = "effect" if _is_variable(topic) else "what happened"
    table_rows = (
        ("" if topic.kind == "check" else meaning_label, topic.meaning),
        ("purpose", " ".join(purpose.split())),
        ("background", " ".join(background.split())),
        ("usual causes", topic.causes),
        ("what to do", topic.action),
        ("also known as", ", ".join(topic.other_names)),
        ("source", "" if topic.kind == "check" else topic.source),
    )
    # The full stop of a single sentence is removed, because other values are phrases.
    yield Facts(
        tuple(
            (label, Text(text if ". " in text else text.removesuffix(".")))
            for label, text in table_rows
            if label and text
        )
    )


def _is_variable(topic: Topic) -> bool:
    return topic.kind.startswith("environment variable")
