from __future__ import annotations

from typing import Any

import pytest

from cudakit.bench.collectives.processes import check_same_options
from cudakit.errors import InputError

FACTS = {"host": "gpu01", "version": "0.1.0", "options": {"--sizes": "1024", "--gpu": "auto"}}


def test_ranks_with_the_same_version_and_options_are_accepted() -> None:
    check_same_options(FACTS, FACTS | {"host": "gpu02"}, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.2.0"}, "rank 3 on gpu02 has cudakit 0.2.0, rank 0 on gpu01 has 0.1.0"),
        (
            {"options": {"--sizes": "2048", "--gpu": "auto"}},
            "rank 3 on gpu02 has --sizes = 2048, rank 0 has 1024",
        ),
        ({"options": {"--sizes": "1024"}}, "rank 3 on gpu02 has --gpu = None, rank 0 has auto"),
    ],
)
def test_rank_with_another_version_or_option_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_same_options(FACTS, FACTS | {"host": "gpu02"} | changes, 3)
