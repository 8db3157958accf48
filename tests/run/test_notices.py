from __future__ import annotations

from pathlib import Path

from cudakit.run.notices import About, Notice, Notices


def test_lines_are_read_once_and_only_whole(tmp_path: Path) -> None:
    notices = Notices(tmp_path)
    with (tmp_path / "7.failed").open("w") as file:
        file.write("first\nsec")
        file.flush()
        assert list(notices.new()) == [Notice(7, About.FAILED, "first")]
        file.write("ond\n")
        file.flush()
        assert list(notices.new()) == [Notice(7, About.FAILED, "second")]
    assert list(notices.new()) == []


def test_other_files_of_a_spool_are_left_alone(tmp_path: Path) -> None:
    for name in ("7-000000.trace", "taken-rank000", "x.failed", "7.other"):
        (tmp_path / name).write_text("line\n")
    (tmp_path / "8.snapshots").write_bytes(b"/caf\xe9.pkl\n")

    (notice,) = Notices(tmp_path).new()

    assert notice.about is About.SNAPSHOTS
    assert notice.text == b"/caf\xe9.pkl".decode("utf-8", "surrogateescape")
