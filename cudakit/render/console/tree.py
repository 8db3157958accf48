"""Trees: the largest branches of a call tree or a flame graph, with their amounts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from rich.cells import cell_len
from rich.text import Text

from cudakit.document import Bytes, Count, Ratio, Seconds, Tree, Value
from cudakit.render.console import theme
from cudakit.render.console.text import escaped, format_value
from cudakit.render.values import magnitude

_MOST_NODES = 24
_MOST_CHILDREN = 6
_MOST_LEVELS = 10


@dataclass(slots=True)
class _Branch:
    """A drawn node with its drawn children, largest first."""

    tree: Tree
    place: int = 0  # among the children of the parent
    level: int = 0
    parent: _Branch | None = None
    children: list[_Branch] = field(default_factory=list)

    @property
    def left_out(self) -> list[Tree]:
        drawn = {child.place for child in self.children}
        return [child for place, child in enumerate(self.tree.children) if place not in drawn]


@dataclass(frozen=True, slots=True)
class _Row:
    value: Value | None
    guides: str
    label: str
    remark: str = ""


def tree_lines(tree: Tree, width: int) -> list[Text]:
    """Draw the largest nodes of a tree, with the number of nodes left out."""
    rows = list(_rows(_pruned(tree), "", ""))
    amounts = _right_aligned(["" if row.value is None else format_value(row.value) for row in rows])
    shares = _right_aligned([_share(row.value, tree.value) for row in rows])
    return [
        _line(row, amount, share, width)
        for row, amount, share in zip(rows, amounts, shares, strict=True)
    ]


def _line(row: _Row, amount: str, share: str, width: int) -> Text:
    share = f"  {share}" if share else ""
    faint = (f"{share}  {row.guides}", theme.FAINT)
    line = Text.assemble(amount, faint, row.label, (row.remark, theme.FAINT))
    line.truncate(width, overflow="ellipsis")
    return line


def _pruned(tree: Tree) -> _Branch:
    """Keep the largest nodes with the paths to them; nodes without an amount in their order."""
    root = _Branch(tree)
    order = count()
    heap = [(0.0, next(order), root)]
    for _ in range(_MOST_NODES):
        if not heap:
            break
        _, _, branch = heappop(heap)
        if branch.parent is not None:
            branch.parent.children.append(branch)
        for child in _candidates(branch):
            heappush(heap, (-magnitude(child.tree.value), next(order), child))
    return root


def _candidates(branch: _Branch) -> list[_Branch]:
    children = branch.tree.children
    level = branch.level + (len(children) > 1)
    if level > _MOST_LEVELS:
        return []
    places = sorted(range(len(children)), key=lambda place: -magnitude(children[place].value))
    return [_Branch(children[place], place, level, branch) for place in places[:_MOST_CHILDREN]]


def _rows(branch: _Branch, guides: str, beneath: str) -> Iterator[_Row]:
    left_out = branch.left_out
    remark = f"  … {len(left_out):,} below" if left_out and not branch.children else ""
    yield _Row(branch.tree.value, guides, escaped(branch.tree.label), remark)
    if len(branch.tree.children) == 1 and branch.children:
        # An only child is right below its parent: a chain of calls needs little indentation.
        yield from _rows(branch.children[0], f"{beneath}╰ ", f"{beneath}  ")
        return
    for index, child in enumerate(branch.children, start=1):
        last = index == len(branch.children) and not left_out
        fork, trunk = ("└─ ", "   ") if last else ("├─ ", "│  ")
        yield from _rows(child, beneath + fork, beneath + trunk)
    if left_out and branch.children:
        value = _sum([child.value for child in left_out])
        yield _Row(value, f"{beneath}└─ ", "", f"… {len(left_out):,} more")


def _sum(values: Sequence[Value]) -> Value | None:
    if all(isinstance(value, Bytes) for value in values):
        return Bytes(sum(value.value for value in values if isinstance(value, Bytes)))
    if all(isinstance(value, Seconds) for value in values):
        return Seconds(sum(value.value for value in values if isinstance(value, Seconds)))
    if all(isinstance(value, Count) for value in values):
        return Count(sum(value.value for value in values if isinstance(value, Count)))
    return None


def _share(value: Value | None, whole: Value) -> str:
    if value is None or not magnitude(whole):
        return ""
    return format_value(Ratio(magnitude(value) / magnitude(whole)))


def _right_aligned(texts: Sequence[str]) -> list[str]:
    width = max(map(cell_len, texts))
    return [" " * (width - cell_len(text)) + text for text in texts]
