from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.fleet.cluster import AUTO, LOCAL, connection_error, distinct_names

# Start of the text of ray.init(address="auto") if no cluster runs.
_NO_CLUSTER = (
    "Could not find any running Ray instance. Please specify the one by setting `--address` flag"
)


def test_error_without_a_cluster_names_no_option_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    error = connection_error(AUTO, _NO_CLUSTER)

    assert str(error) == "no Ray cluster runs on this machine"
    assert "--ray HOST:PORT" in error.hint
    assert "--ray local" in error.hint


@pytest.mark.parametrize(
    ("address", "environment_address", "expected_text"),
    [
        ("node-a:6379", "", "no connection to the Ray cluster node-a:6379: timed out"),
        (AUTO, "", "no connection to the Ray cluster of this machine: timed out"),
        (
            AUTO,
            "node-b:6379",
            "no connection to the Ray cluster node-b:6379 of RAY_ADDRESS: timed out",
        ),
        (LOCAL, "", "no local Ray cluster could be started: timed out"),
    ],
)
def test_connection_error_names_the_cluster(
    monkeypatch: pytest.MonkeyPatch, address: str, environment_address: str, expected_text: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", environment_address)

    assert str(connection_error(address, "timed\nout")) == expected_text


def test_name_of_a_host_is_as_short_as_possible() -> None:
    hosts = [
        ("node-a", "10.0.0.1", "1111111122"),
        ("node-b", "10.0.0.2", "2222222222"),
        ("node-b", "10.0.0.3", "3333333333"),
        ("node-c", "10.0.0.4", "4444444444"),
        ("node-c", "10.0.0.4", "5555555555"),
    ]

    assert distinct_names(hosts) == [
        "node-a",
        "node-b-10.0.0.2",
        "node-b-10.0.0.3",
        "node-c-44444444",
        "node-c-55555555",
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("12"), st.integers(0, 2**32 - 1)),
        unique_by=lambda host: host[2],
    )
)
def test_names_of_hosts_are_distinct(hosts: list[tuple[str, str, int]]) -> None:
    names = distinct_names([(name, address, f"{number:08x}") for name, address, number in hosts])

    assert len(set(names)) == len(hosts)
