from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.sanitize.allocations import Allocations
from cudakit.core.sanitize.races import Allocation
from cudakit.trace.kinds import How


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 10)), max_size=20))
def test_an_address_belongs_to_the_last_allocation_that_nothing_replaced(
    calls: list[tuple[bool, int, int]],
) -> None:
    table, owners = Allocations(), dict[int, Allocation]()
    for seq, (adds, address, size) in enumerate(calls):
        gone = {owners[at] for at in range(address, address + size) if at in owners}
        if adds:
            new = Allocation(address, size, How.SYNC, site=0, seq=seq)
            table.add(new)
        else:
            gone = {one for one in set(owners.values()) if one.address == address}
            assert table.remove(address) == next(iter(gone), None)
        owners = {at: one for at, one in owners.items() if one not in gone}
        if adds:
            owners |= dict.fromkeys(range(address, address + size), new)

        assert [table.at(at) for at in range(45)] == [owners.get(at) for at in range(45)]
