"""The order of ``walk`` through the nodes of a document."""

from __future__ import annotations

from document_views import no_picture

from cudakit.report.document import Facts, Note, Section, View, walk


def test_walk_yields_sections_their_nodes_and_the_fallbacks_of_views_in_order() -> None:
    first, fallback, last = Note("ok", "first"), Note("info", "fallback"), Facts(())
    view = View("picture", (), no_picture, fallback)
    section = Section("outer", (Section("inner", (first, view)),))

    assert list(walk((section, last))) == [section, *section.nodes, first, view, fallback, last]
