"""Fixtures of the tests of loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory.load import files
from memory.load.reading import Loader, Refused

from cudakit.errors import SnapshotError
from cudakit.memory.load import load
from cudakit.memory.snapshot import Snapshot


@pytest.fixture
def loaded(tmp_path: Path) -> Loader:
    """Return a function that writes a snapshot to a file and loads it."""

    def write_and_load(root: Any, form: str = "protocol-4.pkl") -> Snapshot:
        path = tmp_path / form
        path.write_bytes(files.FORMS[form](root))
        return load(str(path))

    return write_and_load


@pytest.fixture
def refused(loaded: Loader) -> Refused:
    """Return a function that writes an invalid snapshot and returns the error message."""

    def reason(root: Any) -> str:
        with pytest.raises(SnapshotError) as caught:
            loaded(root)
        assert caught.value.hint
        return caught.value.message

    return reason
