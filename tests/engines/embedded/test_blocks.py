"""Blocks are conserved, found by what they hold, and evicted in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.engines.embedded.blocks import BlockPool, block_hash
from coterie.errors import ConfigError


def test_a_pool_holds_at_least_one_token():
    with pytest.raises(ConfigError, match="0 blocks of 4 tokens"):
        BlockPool(0, 4)
    with pytest.raises(ConfigError, match="3 blocks of 0 tokens"):
        BlockPool(3, 0)


def test_a_hash_names_the_text_from_its_first_token_on():
    first = block_hash(b"", [1, 2])
    assert first == block_hash(b"", (1, 2))
    assert block_hash(first, [3, 4]) != block_hash(b"", [3, 4]) != block_hash(b"", [4, 3])


def test_too_many_blocks_are_not_handed_out_in_part():
    pool = BlockPool(3, 4)
    assert pool.allocate(4) is None
    assert pool.available == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_released_content_is_found_until_its_block_is_needed():
    pool = BlockPool(2, 4)
    one, two = pool.allocate(2)
    pool.publish(one, b"one")
    pool.publish(two, b"two")
    pool.release([one, two])
    assert (pool.held, pool.cached, pool.available) == (0, 2, 2)
    assert pool.find([b"one", b"two", b"three"]) == [one, two]
    assert pool.allocate(1) == [two]  # the end of a text goes first
    assert pool.find([b"one", b"two"]) == [one]
    assert pool.find([b"two"]) == []


def test_the_least_recently_released_is_evicted_first():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.publish(block, bytes([block]))
    for block in (blocks[1], blocks[2], blocks[0]):
        pool.release([block])
    pool.hold([blocks[2]])
    pool.release([blocks[2]])  # used again: now the last
    assert pool.allocate(3) == [blocks[1], blocks[0], blocks[2]]


def test_a_shared_block_is_held_until_its_last_user_lets_go():
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"shared")
    assert pool.unheld(blocks) == 0
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.held == 1
    assert pool.allocate(2) is None
    pool.release(blocks)
    assert (pool.held, pool.unheld(blocks)) == (0, 1)


def test_of_two_blocks_with_one_content_the_first_is_found():
    pool = BlockPool(2, 4)
    one, two = pool.allocate(2)
    pool.publish(one, b"same")
    pool.publish(two, b"same")
    pool.check()
    pool.release([two])
    pool.release([one])
    assert pool.find([b"same"]) == [one]
    assert pool.cached == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60))
def test_no_block_is_lost_or_in_two_states(script):
    pool = BlockPool(6, 4)
    users: list[list[int]] = []
    named: set[int] = set()
    for action, number in script:
        if action == 0 and (new := pool.allocate(number)) is not None:
            users.append(new)
            named -= set(new)
        elif action == 1 and users:
            pool.release(users.pop(number % len(users)))
        elif action == 2 and users:
            for block in users[number % len(users)]:
                if block not in named:  # a full block says one thing
                    pool.publish(block, bytes([number]))
                    named.add(block)
        elif action == 3 and (found := pool.find([bytes([number])])):
            pool.hold(found)
            users.append(found)
        pool.check()
        assert pool.held == len({block for own in users for block in own})
    for own in users:
        pool.release(own)
    assert pool.available == 6
