from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))

    assert [link for link in links if not (page.parent / link).exists()] == []


ARCHITECTURE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for package in ("cudakit", "scripts", "tests")
    for path in sorted((ROOT / package).rglob("*"))
    if path.suffix in {".py", ".c"}
}
_DEFINITION = re.compile(r"^ *(?:def|static [\w *]+?[ *])\s*(\w+)\(", re.MULTILINE)


@pytest.mark.parametrize("page", ["docs/explanation/architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_for_contributors_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|c))`", text)) - {"setup.py"}
    missing = [
        name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in SOURCES)
    ]

    assert missing == []


def test_functions_named_in_the_call_chains_are_defined() -> None:
    section = ARCHITECTURE.partition("## Call chains")[2].partition("\n## ")[0]
    functions = set(re.findall(r"`(?:\w+\.)?(?!py`)(_?[a-z]\w+)`", section))
    defined = {
        name
        for path, text in SOURCES.items()
        if path.startswith("cudakit/")
        for name in _DEFINITION.findall(text)
    }

    assert len(functions) > 20
    assert functions - defined == set()
