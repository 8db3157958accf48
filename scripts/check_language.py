"""Find words and phrases that need a second reading, and print the plain replacement.

    python scripts/check_language.py [--count] [PATH...]

Reads comments, docstrings, string literals and defined names in Python, comments and string literals in
C and CUDA, comments in shell scripts and configuration files, and Markdown without its inline code.
Without PATH: the package, tests, scripts, examples, docs and the pages at the top. ``--count`` prints the
number of findings per package. Exits with 1 if anything was found.

``PHRASES`` and ``NAMES`` list what is flagged, ``EXCEPTIONS`` the files that may use a word, with the reason.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PATHS = (
    "cudakit",
    "tests",
    "scripts",
    "examples",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
    "setup.py",
)
"""The change log is left out: entries of past releases are history."""

SKIPPED_PARTS = {".venv", "__pycache__", "golden", "data", "node_modules"}

METAPHORS = {
    r"waist": "common format",
    r"rooms?": "package, space, capacity",
    r"seams?": "interface, boundary",
    r"voices?": "messages, output",
    r"judge[sd]?|judging": "check, evaluate, decide",
    r"witness(?:es|ed)?": "observer, evidence",
    r"tally|tallies|tallied": "count, statistics",
    r"ledgers?": "counters, records",
    r"tellings?": "report, emit",
    r"twins?": "counterpart, Python version, fixed variant",
    r"mend(?:s|ed|ing)?": "fix, repair",
    r"fare[sd]?": "perform, state",
    r"neighbou?rs?": "adjacent, peer, nearby",
    r"pardon(?:s|ed)?": "ignore, already reported",
    r"rivals?": "baseline, library",
    r"contenders?": "candidate, baseline",
    r"surroundings|circumstances": "environment, run context",
}

DIALECT = {
    r"(?:tell|tells|told|telling) of": "report",
    r"(?:stand|stands|stood|standing) (?:with|beside)": "is shown with, is next to",
    r"so (?:many|few)(?! that\b)": "N, the number of",
    r"so much of": "the part of, N bytes of",
    r"as many as": "the number of, up to",
    r"(?:is|are|was|were) meant": "refers to, is intended",
    r"(?<!make )(?:of use|of no use)": "useful, useless",
    r"(?:say|says|tell|tells) whether": "return whether, return True if",
    r"by and by": "later, gradually",
    r"(?:is|are|be) told(?: apart)?": "receives, is distinguished",
    r"die[sd]? of": "is killed by",
    r"taken for": "treated as",
    r"lest|whence|thereby|thereof|afresh": "plain words",
}

STARTS = {
    r"(?:^|[.:;] )Where (?![^.?]*\?)[^.?,]*,": '"If …" for a condition',
    r"^(?:What|Who) (?![^?]*\?)\w+ \w+(?= )": "a sentence with a subject and a verb",
    r"^(?:Say|Let|Tell) ": "Return, Check, Allow",
}
"""Flagged at the start of a text: a docstring, comment, message or help text."""

NAMES = {
    r"test_(?:what|it|they|who|where|this|that)_\w+": "test_SUBJECT_BEHAVIOUR",
    r"test_\w+_(?:is|are)_(?:told|said|meant)\w*": "is_reported, is_printed",
}

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("scripts/check_language.py", "*"): "lists the words",
    ("tests/scripts/test_check_language.py", "*"): "tests the words",
    ("cudakit/core/bench/", "contender"): "a field of the JSON document cudakit.bench/1",
    ("tests/cli/bench/", "contender"): "the same field",
    ("scripts/bench_gemm.py", "contender"): "the same field",
    ("scripts/repeat_bench.py", "contender"): "the same field",
}
"""Reasons by path prefix and word; ``*`` stands for each word."""


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose or a name, with the line it starts on."""

    line: int
    words: str
    is_name: bool = False
    is_sentence: bool = False
    """True at the start of a docstring, comment or message, where ``STARTS`` holds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A word to replace."""

    path: str
    line: int
    word: str
    plain: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: {self.plain}"


def compiled(table: dict[str, str], flags: re.RegexFlag) -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile(rf"(?<![\w-])(?:{each})(?![\w-])", flags), plain)
        for each, plain in table.items()
    ]


PHRASES = compiled(METAPHORS | DIALECT, re.IGNORECASE)
NAME_WORDS = compiled(METAPHORS, re.IGNORECASE)
SENTENCE_STARTS = [(re.compile(each), plain) for each, plain in STARTS.items()]
NAME_PATTERNS = [(re.compile(each), plain) for each, plain in NAMES.items()]


def python_texts(source: str) -> Iterator[Text]:
    """Yield the comments, string literals and defined names of a Python module."""
    yield from python_prose(source)
    for node in ast.walk(ast.parse(source)):
        for name in defined_names(node):
            yield Text(getattr(node, "lineno", 1), name, is_name=True)


def python_prose(source: str) -> Iterator[Text]:
    """Yield the comments and strings; comment lines, and adjacent strings, form one text."""
    line, parts = 0, list[str]()
    last = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = token.type
        if kind == tokenize.COMMENT:
            words = token.string.lstrip("#: ")
        elif kind == tokenize.STRING or tokenize.tok_name[kind] == "FSTRING_MIDDLE":
            words = string_words(token.string)
        elif kind in {tokenize.NL, tokenize.INDENT, tokenize.DEDENT}:
            continue
        else:
            words = ""
        continues = parts and words and (kind == last[0] and token.start[0] - last[1] <= 1)
        if parts and not continues:
            yield from paragraphs(line, "".join(parts))
            parts = []
        if words:
            if not parts:
                line = token.start[0]
            parts.append(words + "\n" if kind == tokenize.COMMENT else words)
            last = kind, token.end[0]
    yield from paragraphs(line, "".join(parts))


def string_words(literal: str) -> str:
    """Return the text of a string literal, without the expressions of an f-string."""
    prefix, quote = re.match(r"([A-Za-z]*)('''|\"\"\"|'|\"|)", literal).groups()  # type: ignore[union-attr]
    if not quote:
        return literal
    body = literal[len(prefix) + len(quote) : -len(quote)]
    return re.sub(r"\{[^{}]*\}", "…", body) if "f" in prefix.lower() else body


def paragraphs(line: int, body: str) -> Iterator[Text]:
    """Yield each paragraph of a text as one line, so that phrases over a line break are found."""
    for paragraph in re.finditer(r"(?:[^\n]*\S[^\n]*(?:\n|$))+", body):
        start = line + body.count("\n", 0, paragraph.start())
        plain = re.sub(r"``[^`]*``|`[^`]*`", "…", paragraph[0])
        for part in re.split(r"\n(?=\s*(?:[-*|#>]|\d+\.) )", plain):
            yield Text(start, " ".join(part.split()), is_sentence=True)
            start += part.count("\n") + 1


def defined_names(node: ast.AST) -> list[str]:
    """Return the names that a node defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
    return []


C_TEXT = re.compile(
    r"//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/|\"(?P<string>(?:\\.|[^\"\\\n])*)\"", re.DOTALL
)


def c_texts(source: str) -> Iterator[Text]:
    """Yield the comments and string literals of C or CUDA; adjacent ``//`` lines form one text."""
    end, line, lines = -1, 0, list[str]()
    for match in C_TEXT.finditer(source):
        start = source.count("\n", 0, match.start()) + 1
        if match["line"] is not None and start == end + 1 and lines:
            lines.append(match["line"])
            end = start
            continue
        yield from paragraphs(line, "\n".join(lines))
        lines = []
        if match["line"] is not None:
            line = end = start
            lines = [match["line"]]
            continue
        body = match["block"] if match["block"] is not None else match["string"]
        yield from paragraphs(start, re.sub(r"(?m)^[ \t]*\*", "", body))
    yield from paragraphs(line, "\n".join(lines))


def hash_comments(source: str) -> Iterator[Text]:
    """Yield the comments of a shell script or a configuration file."""
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"(?:^|\s)#(?!!)\s*(.*)", line):
            yield Text(number, match[1])


def markdown_texts(source: str) -> Iterator[Text]:
    """Yield the paragraphs of a Markdown page; headings and table rows may start with a question word."""
    for text in paragraphs(1, source):
        yield Text(text.line, text.words)


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the texts of a file, its name included; nothing if the format is unknown."""
    reader = {
        ".py": python_texts,
        ".md": markdown_texts,
        ".toml": hash_comments,
        ".yml": hash_comments,
    }
    reader |= dict.fromkeys((".c", ".h", ".cu", ".cuh"), c_texts)
    is_script = path.suffix == "" and path.read_bytes()[:2] == b"#!"
    if read := hash_comments if is_script else reader.get(path.suffix):
        yield Text(1, path.stem, is_name=True)
        yield from read(path.read_text(encoding="utf-8"))


def findings_in(
    path: str, texts: Iterable[Text], exceptions: Collection[tuple[str, str]] = EXCEPTIONS
) -> Iterator[Finding]:
    """Yield the findings in the texts of one file."""
    for text in texts:
        rules = NAME_WORDS + NAME_PATTERNS if text.is_name else PHRASES
        rules = [*rules, *(SENTENCE_STARTS if text.is_sentence else ())]
        words = name_words(text.words) if text.is_name else text.words
        for pattern, plain in rules:
            for match in pattern.finditer(
                text.words if (pattern, plain) in NAME_PATTERNS else words
            ):
                word = match[0].strip(".:; ")
                if not is_exception(path, word, exceptions):
                    yield Finding(path, text.line, word, plain)


def name_words(name: str) -> str:
    """Return a name as separate words: ``pool_tally`` and ``PoolTally`` as "pool tally"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name)


def is_exception(path: str, word: str, exceptions: Collection[tuple[str, str]]) -> bool:
    """Return whether a file may use a word."""
    return any(
        path.startswith(prefix) and allowed in ("*", word.lower()) for prefix, allowed in exceptions
    )


def files_under(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files to check, directories walked."""
    for path in paths:
        if path.is_dir():
            yield from files_under(sorted(path.iterdir())) if path.name not in SKIPPED_PARTS else ()
        elif path.is_file():
            yield path


def package_of(path: str) -> str:
    """Return the package a path counts for: three levels in core and gpu, two elsewhere."""
    parts = path.split("/")[:-1]
    return "/".join(parts[: 3 if parts[1:2] in (["core"], ["gpu"]) else 2]) or path


def relative(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--count", action="store_true", help="print the number of findings per package"
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files and directories [all]")
    given = parser.parse_args(arguments)
    findings = [
        finding
        for path in files_under(given.paths or [ROOT / folder for folder in DEFAULT_PATHS])
        for finding in findings_in(relative(path), texts_of(path))
    ]
    if given.count:
        for package, count in Counter(
            package_of(finding.path) for finding in findings
        ).most_common():
            print(f"{count:6} {package}")
    else:
        print(*findings, sep="\n", end="\n" if findings else "")
    print(f"{len(findings)} to replace", file=sys.stderr)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
