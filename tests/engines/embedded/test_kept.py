"""A lease ends once: by the other engine, or by time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from coterie.engines.embedded.kept import KeptTable


def test_released_blocks_are_collected_once():
    table = KeptTable(10)
    kept = table.keep("a", (1, 2), 7, now_s=5)
    assert (kept.blocks, kept.tokens, kept.expires_s, len(table), "a" in table) == ((1, 2), 7, 15, 1, True)
    assert table.collect(14.9) == []
    assert table.release("a")
    assert not table.release("a")
    assert table.collect(20) == [kept]
    assert table.collect(99) == []


def test_the_first_lease_to_run_out_is_the_one_to_wait_for():
    table = KeptTable(10)
    assert table.next_expiry_s() is None
    table.keep("a", (1,), 1, now_s=0)
    table.keep("b", (2,), 1, now_s=2)
    assert table.next_expiry_s() == 10
    assert table.renew("a", 4)
    assert table.next_expiry_s() == 12
    assert [kept.blocks for kept in table.collect(13)] == [(2,)]
    assert [kept.blocks for kept in table.collect(14)] == [(1,)]
    assert not table.renew("a", 14)


def test_of_many_that_release_one_lease_one_is_told_so():
    table = KeptTable(10)
    with ThreadPoolExecutor(8) as threads:
        for number in range(200):
            table.keep(str(number), (number,), 1, now_s=0)
            assert sum(threads.map(table.release, [str(number)] * 8)) == 1
    assert len(table.collect(0)) == 200
