"""Random valid settings for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from cudakit.torch_rules.setting_keys import FULL_RESERVE, KEYS, LARGEST_MIB, Reserve
from cudakit.torch_rules.settings import Settings
from cudakit.units import MIB

NATIVE = frozenset(key.field for key in KEYS.values() if key.native)

_switches = st.booleans()
_divisions = st.one_of(st.just(0), st.integers(0, 62).map(lambda n: 1 << n))
_reserves = st.one_of(
    st.floats(0, FULL_RESERVE, exclude_min=True).map(lambda share: Reserve(value=share)),
    st.floats(0, 1e300, exclude_min=True).map(lambda gib: Reserve(value=gib, unit="GiB")),
)
_names = st.text(min_size=1).filter(lambda s: not any(c in ",:[]" or c.isspace() for c in s))


def _sizes(least_mib: int) -> st.SearchStrategy[int]:
    few = st.integers(least_mib, min(least_mib + 100, LARGEST_MIB))
    return st.one_of(few, st.integers(least_mib, LARGEST_MIB)).map(lambda n: n * MIB)


@st.composite
def settings(draw: st.DrawFn) -> Settings:
    """Draw settings of either backend; each field has its default, or anything it may have."""
    large = draw(st.one_of(st.just(20 * MIB), _sizes(11)))
    above = st.one_of(st.none(), _sizes(large // MIB))
    values: dict[str, st.SearchStrategy[object]] = {
        "backend": st.sampled_from(["native", "cudaMallocAsync"]),
        "max_split_size_bytes": above,
        "max_non_split_rounding_bytes": above,
        "large_segment_size_bytes": st.just(large),
        "roundup_power2_divisions": st.one_of(
            st.lists(_divisions, min_size=16, max_size=16).map(tuple),
            st.tuples(_divisions, _divisions, st.integers(0, 16)).map(
                lambda two: (two[0],) * two[2] + (two[1],) * (16 - two[2])
            ),
        ),
        "garbage_collection_threshold": st.floats(0, 1, exclude_max=True),
        "memory_fraction": st.floats(0, 1),
        "expandable_segments_reserve": st.one_of(st.none(), _reserves),
        "expandable_segments_reserve_by_class": st.lists(
            st.tuples(_names, _reserves), max_size=4, unique_by=lambda pair: pair[0]
        ).map(tuple),
        "pinned_num_register_threads": st.integers(0, 7).map(lambda n: 1 << n),
        "pinned_max_round_threshold_bytes": st.one_of(st.none(), _sizes(0)),
        "pinned_max_cached_size_bytes": st.one_of(st.none(), _sizes(0)),
        "pinned_reserve_segment_size_bytes": _sizes(0),
    }
    changed = draw(st.sets(st.sampled_from([key.field for key in KEYS.values()])))
    chosen = {name: draw(values.get(name, _switches)) for name in sorted(changed)}
    chosen["large_segment_size_bytes"] = large
    if chosen.get("backend") == "cudaMallocAsync":
        chosen = {name: value for name, value in chosen.items() if name not in NATIVE}
    return Settings(**chosen)  # type: ignore[arg-type]
