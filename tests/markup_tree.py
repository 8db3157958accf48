"""Parse a page to elements, attributes and texts, as a browser does."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset({"br", "link", "meta"})


@dataclass
class Node:
    """An element with its texts and elements, in order."""

    tag: str
    attributes: dict[str, str | None]
    content: list[str | Node] = field(default_factory=list)

    @property
    def children(self) -> list[Node]:
        return [part for part in self.content if isinstance(part, Node)]

    @property
    def text(self) -> str:
        """The text directly in the element."""
        return "".join(part for part in self.content if isinstance(part, str))

    def all(self, tag: str, class_: str = "") -> list[Node]:
        """Return the descendants with a tag, and with a class if one is given."""
        found = [child for child in self.children if child.tag == tag and class_ in child.classes]
        return found + [node for child in self.children for node in child.all(tag, class_)]

    def one(self, tag: str, class_: str = "") -> Node:
        (node,) = self.all(tag, class_)
        return node

    @property
    def classes(self) -> list[str]:
        return ["", *(self.attributes.get("class") or "").split()]

    @property
    def words(self) -> str:
        """The text of the element and its descendants."""
        return "".join(part if isinstance(part, str) else part.words for part in self.content)

    def skeleton(self) -> tuple[object, ...]:
        """Return tags and attribute names, which no text may change."""
        return (self.tag, tuple(self.attributes), tuple(c.skeleton() for c in self.children))

    def walk(self) -> list[Node]:
        return [self, *(node for child in self.children for node in child.walk())]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Node("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        assert len(node.attributes) == len(attrs), f"an attribute of <{tag}> is given twice"
        self.open[-1].content.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].content.append(data)


def read(page: str) -> Node:
    """Parse markup with properly nested elements."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    (root,) = reader.open
    return root
