"""torch.distributed as a library of collective operations, without a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import cast

import pytest

from cudakit.errors import MissingDependency
from cudakit.gpu.collectives import open_collectives
from cudakit.gpu.collectives.library import CollectiveDevice


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_missing_torch_names_the_package() -> None:
    with pytest.raises(MissingDependency, match="torch is not installed") as raised:
        open_collectives(cast(CollectiveDevice, None), "torch")

    assert raised.value.hint == "pip install 'torch'"
