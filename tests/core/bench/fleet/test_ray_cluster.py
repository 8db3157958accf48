from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.bench.fleet.ray_cluster import distinct_names


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
