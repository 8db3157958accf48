from __future__ import annotations

import pytest

from cudakit.devices.diagnose.checks import checks_by_id
from cudakit.devices.diagnose.variable_table import Variable, known_variables
from cudakit.torch_rules.settings import VARIABLES

TABLE = known_variables()


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_variable_has_effect_library_and_source(row: Variable) -> None:
    assert row.name.isupper()
    assert row.effect
    assert row.library
    assert row.source
    assert not row.check or row.check in checks_by_id()


@pytest.mark.parametrize(
    "name",
    [*VARIABLES, "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_BLAS_PREFER_CUBLASLT", "XDG_CACHE_HOME"],
)
def test_table_contains_variables_of_allocators_and_cudakit(name: str) -> None:
    assert name in TABLE
