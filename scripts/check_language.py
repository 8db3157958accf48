"""Find words and phrases that need a second reading, and print plain replacements.

    python scripts/check_language.py [--count] [PATH...]

Reads comments, docstrings, string literals and defined names in Python, comments and string literals in
C and CUDA, comments in shell scripts and configuration files, and Markdown without its inline code.
Without PATH: the package, tests, scripts, examples, docs and the pages at the top. ``--count`` prints the
number of findings per package. Exits with 1 if anything was found.

``PHRASES`` and ``NAMES`` list what is flagged, ``EXCEPTIONS`` the files that may use a word, with the reason.
The comment at the end of the line of an attribute must be a noun phrase, or "whether ..." for a bool. A
name in double backticks in a docstring of the package must exist: ``unknown_names`` has the rule.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import io
import keyword
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
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
"""The paths to check without arguments. The change log is left out: it describes past releases."""

SKIPPED_DIRECTORIES = {".venv", "__pycache__", "golden", "data", "node_modules"}

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
    r"^(?:Seen|Reported|Looked up|Subscribed|Needed|Computed|Observed|Filled|Included) (?!for\b)[a-z]": (
        "a sentence with a subject"
    ),
}
"""Patterns that are flagged at the start of a text: a docstring, comment, message or help text."""

NAMES = {
    r"test_(?:what|it|they|who|where|this|that)_\w+": "test_SUBJECT_BEHAVIOUR",
    r"test_\w+_(?:is|are)_(?:told|said|meant)\w*": "is_reported, is_printed",
}

PACKAGE_NAMES = {
    r"^_*(?:own|told|said|kept|given|taken|wanted|meant|heard|found|whole|ours|theirs|mine"
    r"|things?|stuff|giver|taker|those|vain)$": "the object that it refers to",
}
"""Names in the package that say nothing about the object. Tests may use them for local values."""

ATTRIBUTE_STARTS = {
    r'^"[^"]*"$': "a noun first, then the example",
    r"^(?:of|in|at|by|as|from|for|per|such as|and|uncompressed|includes)\b": "a noun first",
    r"^(?:None|null|-?\d+)(?=:| if\b| until\b| for\b)": "a noun first, then the meaning of None",
}
"""Patterns that are flagged at the start of a comment that describes an attribute."""

BOOL_ATTRIBUTE_STARTS = {r"^(?![Ww]hether\b|True if\b|False (?:if|for)\b)\S+": "whether ..."}
"""Patterns that are flagged at the start of a comment that describes an attribute of type bool."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("scripts/check_language.py", "*"): "lists the words",
    ("tests/scripts/test_check_language.py", "*"): "tests the words",
    ("cudakit/bench/", "contender"): "a field of the JSON document cudakit.bench/1",
    ("tests/cli/bench/", "contender"): "the same field",
    ("tests/gpu/test_real_collectives.py", "contender"): "the same field",
    ("scripts/bench_gemm.py", "contender"): "the same field",
    ("scripts/repeat_bench.py", "contender"): "the same field",
}
"""The reason for each exception, by path prefix and allowed word; ``*`` allows every word."""

EXTERNAL_NAMES = {
    "CUDA": ("cudaEventQuery", "cudaStreamQuery", "offset", "subsequence"),
    "data types": ("fp8_e4m3",),
    "PyTorch": (
        "_record_memory_history",
        "action_to_str",
        "allocator_settings",
        "backward",
        "device_total_bytes",
        "host_segments",
        "host_traces",
        "internal_metadata",
        "per_process_memory_fraction",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "record_function",
        "roundup_power2_divisions",
    ),
    "numpy": ("exp", "isnan", "maximum", "mean", "prod", "where"),
    "other libraries": (
        "_PendingDeallocs",
        "bash_complete",
        "bash_source",
        "nohup",
        "nvtxRangeStart",
        "reserved",
        "tensordot_core",
    ),
    "C files of the package": ("push_object",),
}
"""Names to which docstrings of the package refer, by their origin."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph or a name in a file, with its first line."""

    line: int
    words: str
    is_name: bool = False
    is_sentence: bool = False
    """True for a docstring, comment or message, to which ``STARTS`` applies."""

    attribute_type: str | None = None
    """The annotation of the attribute that a comment describes, "" without one; None for other texts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A word to replace, and the replacement."""

    path: str
    line: int
    word: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: {self.replacement}"


def compile_words(table: dict[str, str], flags: re.RegexFlag) -> list[tuple[re.Pattern[str], str]]:
    return [
        (re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", flags), replacement)
        for words, replacement in table.items()
    ]


PHRASES = compile_words(METAPHORS | DIALECT, re.IGNORECASE)
NAME_WORDS = compile_words(METAPHORS, re.IGNORECASE)
SENTENCE_STARTS = [(re.compile(pattern), replacement) for pattern, replacement in STARTS.items()]
NAME_PATTERNS = [(re.compile(pattern), replacement) for pattern, replacement in NAMES.items()]
PACKAGE_NAME_PATTERNS = [(re.compile(pattern), plain) for pattern, plain in PACKAGE_NAMES.items()]
ATTRIBUTE_PATTERNS = [
    (re.compile(pattern, re.IGNORECASE), plain) for pattern, plain in ATTRIBUTE_STARTS.items()
]
BOOL_PATTERNS = [(re.compile(pattern), plain) for pattern, plain in BOOL_ATTRIBUTE_STARTS.items()]


def python_texts(source: str) -> Iterator[Text]:
    """Yield the comments, string literals and defined names of a Python module."""
    yield from python_prose(source)
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        for name in defined_names(node):
            yield Text(getattr(node, "lineno", 1), name, is_name=True)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_attribute(node):
            yield from attribute_comments(node, lines)


def is_attribute(node: ast.Assign | ast.AnnAssign) -> bool:
    """Return whether an assignment has an annotation, or sets a constant or an attribute of ``self``."""
    if isinstance(node, ast.AnnAssign):
        return True
    target = node.targets[0]
    return isinstance(target, ast.Attribute) or (
        isinstance(target, ast.Name) and target.id.isupper()
    )


def attribute_comments(node: ast.Assign | ast.AnnAssign, lines: list[str]) -> Iterator[Text]:
    """Yield the comment after an assignment on its last line, unless it is an instruction to a tool."""
    end_line = node.end_lineno or node.lineno
    after = lines[end_line - 1].encode()[node.end_col_offset :].decode()
    match = re.match(r"\s*#\s*(?!noqa|type:)(.*)", after)
    if match:
        annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        yield Text(end_line, match[1], attribute_type=annotation)


def python_prose(source: str) -> Iterator[Text]:
    """Yield the comments and strings; adjacent comment lines, or adjacent strings, form one text."""
    first_line, literals = 0, list[str]()
    last_kind, last_line = 0, 0
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
        continues = literals and words and kind == last_kind and token.start[0] - last_line <= 1
        if literals and not continues:
            yield from paragraphs(first_line, "".join(literals))
            literals = []
        if words:
            if not literals:
                first_line = token.start[0]
            literals.append(words + "\n" if kind == tokenize.COMMENT else words)
            last_kind, last_line = kind, token.end[0]
    yield from paragraphs(first_line, "".join(literals))


def string_words(literal: str) -> str:
    """Return the text of a string literal, without the expressions of an f-string."""
    prefix, quote = re.match(r"([A-Za-z]*)('''|\"\"\"|'|\"|)", literal).groups()  # type: ignore[union-attr]
    if not quote:
        return literal
    body = literal[len(prefix) + len(quote) : -len(quote)]
    return re.sub(r"\{[^{}]*\}", "…", body) if "f" in prefix.lower() else body


def paragraphs(line: int, body: str) -> Iterator[Text]:
    """Yield each paragraph of a text as one line, so that phrases that contain a line break are found."""
    for paragraph in re.finditer(r"(?:[^\n]*\S[^\n]*(?:\n|$))+", body):
        start = line + body.count("\n", 0, paragraph.start())
        without_code = re.sub(r"``[^`]*``|`[^`]*`", "…", paragraph[0])
        for item in re.split(r"\n(?=\s*(?:[-*|#>]|\d+\.) )", without_code):
            yield Text(start, " ".join(item.split()), is_sentence=True)
            start += item.count("\n") + 1


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
    """Yield the paragraphs of a Markdown page; no ``STARTS``, because headings are no sentences."""
    for text in paragraphs(1, source):
        yield Text(text.line, text.words)


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the name of a file and its texts; nothing if the format is unknown."""
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
        rules = rules_of(text)
        if text.is_name and path.startswith("cudakit/"):
            rules = rules + PACKAGE_NAME_PATTERNS
        words = name_words(text.words) if text.is_name else text.words
        for pattern, replacement in rules:
            for match in pattern.finditer(
                text.words if (pattern, replacement) not in NAME_WORDS else words
            ):
                word = match[0].strip(".:; ")
                if not is_exception(path, word, exceptions):
                    yield Finding(path, text.line, word, replacement)


def rules_of(text: Text) -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns that are flagged in a text, each with its replacement."""
    if text.attribute_type is not None:
        return BOOL_PATTERNS if text.attribute_type.startswith("bool") else ATTRIBUTE_PATTERNS
    if text.is_name:
        return NAME_WORDS + NAME_PATTERNS
    return PHRASES + (SENTENCE_STARTS if text.is_sentence else [])


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def unknown_names(path: str, source: str, package_names: Collection[str]) -> Iterator[Finding]:
    """Yield the names in double backticks in the docstrings of functions and classes that do not exist.

    A name exists if it is a parameter or another name of the definition; an attribute, an import, a word in a
    short string or the value of a module-level name of the file; or one of ``package_names``.
    """
    module = ast.parse(source)
    shared_names: set[str] | None = None
    for node in ast.walk(module):
        if not isinstance(node, Definition):
            continue
        quoted_names = re.findall(r"``([a-z_]\w+)(?:\(\))?``", ast.get_docstring(node) or "")
        names = set(quoted_names).difference(package_names)
        for name in sorted(names - identifiers_below(node) if names else ()):
            if shared_names is None:
                shared_names = shared_identifiers(module)
            if name not in shared_names:
                yield Finding(
                    path, node.lineno, name, "the new name of the parameter or definition"
                )


def shared_identifiers(module: ast.Module) -> set[str]:
    """Return the identifiers of a file without the parameters and variables of its functions."""
    assignments = [node for node in module.body if isinstance(node, ast.Assign)]
    return set().union(
        *(identifiers(node) for node in code_nodes(module) if not is_local(node)),
        *map(identifiers_below, assignments),
    )


def is_local(node: ast.AST) -> bool:
    """Return whether a node names a parameter or variable, which other functions cannot refer to."""
    return isinstance(node, (ast.arg, ast.keyword, ast.Name))


def identifiers_below(node: ast.AST) -> set[str]:
    """Return the identifiers in a node and its descendants."""
    return {name for child in code_nodes(node) for name in identifiers(child)}


def code_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants without docstrings."""
    unvisited = [node]
    while unvisited:
        node = unvisited.pop()
        yield node
        unvisited += [child for child in ast.iter_child_nodes(node) if not is_docstring(child)]


def is_docstring(node: ast.AST) -> bool:
    """Return whether a node is a string literal that is a statement."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def identifiers(node: ast.AST) -> list[str]:
    """Return the identifiers that a node contains itself, including the words of a string of one line."""
    match node:
        case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.Name(id=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.alias(name=name, asname=new_name):
            return [*name.split("."), new_name or ""]
        case ast.Constant(value=str(text)) if "\n" not in text and len(text) < 60:
            return re.findall(r"\w+", text)
    return []


@cache
def names_of_package() -> frozenset[str]:
    """Return the names of the package's functions, classes and modules, of builtins, and external names."""
    names = {*dir(builtins), *keyword.kwlist}.union(*EXTERNAL_NAMES.values())
    for path in (ROOT / "cudakit").rglob("*.py"):
        names.update(path.relative_to(ROOT).with_suffix("").parts)
        names.update(re.findall(r"(?:def|class) (\w+)", path.read_text(encoding="utf-8")))
    return frozenset(names)


def name_words(name: str) -> str:
    """Return a name as separate words: ``pool_tally`` and ``PoolTally`` as "pool tally"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name)


def is_exception(path: str, word: str, exceptions: Collection[tuple[str, str]]) -> bool:
    """Return whether a file may use a word."""
    return any(
        path.startswith(prefix) and allowed in ("*", word.lower()) for prefix, allowed in exceptions
    )


def findings_of(path: Path) -> Iterator[Finding]:
    """Yield the findings in a file."""
    name = relative(path)
    yield from findings_in(name, texts_of(path))
    if name.startswith("cudakit/") and path.suffix == ".py":
        yield from unknown_names(name, path.read_text(encoding="utf-8"), names_of_package())


def files_under(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the given files and all files in the given directories."""
    for path in paths:
        if path.is_dir():
            yield from (
                files_under(sorted(path.iterdir())) if path.name not in SKIPPED_DIRECTORIES else ()
            )
        elif path.is_file():
            yield path


def package_of(path: str) -> str:
    """Return the package in which a file is counted: three levels in core and gpu, two elsewhere."""
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
    options = parser.parse_args(arguments)
    findings = [
        finding
        for path in files_under(options.paths or [ROOT / folder for folder in DEFAULT_PATHS])
        for finding in findings_of(path)
    ]
    if options.count:
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
