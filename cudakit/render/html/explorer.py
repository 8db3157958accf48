"""Interactive pictures: their data and the place where their script draws."""

from __future__ import annotations

import json

from cudakit.document import Explorer
from cudakit.render.html.packed import pack
from cudakit.render.markup import Markup, element


def explorer(node: Explorer) -> Markup:
    """Return the element that the script ``KIND.js`` fills; it holds all data as text."""
    data = node.data()
    described, text = pack(data.arrays)
    facts = json.dumps({"arrays": described, "facts": data.facts}, ensure_ascii=True)
    # A script element ends at "</script", whatever its type; JSON can write "<" in another way.
    facts = facts.replace("<", "\\u003c")
    return element(
        "div",
        element(
            "div",
            element("p", "Loading the interactive views.", class_="muted"),
            class_="explorer-views",
        ),
        element(
            "noscript",
            element("p", "The interactive views need JavaScript; the tables below do not."),
        ),
        element("script", Markup(facts), type="application/json", class_="explorer-facts"),
        element("script", Markup(text), type="text/plain", class_="explorer-data"),
        class_="explorer",
        data_kind=node.kind,
    )
