"""Each fault of a worker at each moment of a request: what the client gets, and that nothing is left behind."""

import asyncio

import pytest
from fault_cells import CELLS, MOST_500S, right_ends
from fault_cluster import PROMPTS, ROLES
from fault_proxy import Moment, Trap

from waiting import wait_until


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_worker_fails(matrix, cell):
    found = matrix.run(cell)  # which ends with all workers back, no load counted and no KV held
    ends = [*found.ends, *found.later]
    assert {*ends} <= right_ends(cell), found
    assert ends.count("500") <= MOST_500S
    assert not matrix.cluster.stranded_files()


# --- workers that come and go by an operator's wish -----------------------------------------------------


def named(cluster, engine):
    """The gateway's name for an engine, None where it does not know it: names are not used twice."""
    rows = cluster.workers().values()
    return next((row["name"] for row in rows if row["url"] == engine.proxy.url), None)


def remove(cluster, engine):
    cluster.admin(f"/workers/{named(cluster, engine)}", "DELETE")


def add(cluster, engine):
    cluster.admin("/workers", "POST", {"role": engine.role, "url": engine.proxy.url})


def used(cluster, engine):
    """Whether a round of requests reaches an engine."""
    before = engine.metric("coterie:engine_steps_total")
    cluster.ask_all(list(PROMPTS[:3]))
    return engine.metric("coterie:engine_steps_total") > before


def during(matrix, role, moment, change):
    """The end of a request amid which the worker that has it, or another, is added or removed."""
    cluster = matrix.cluster
    if moment is Moment.BEFORE:
        change(cluster.engines[role][0])
        return matrix.ends([cluster.ask(PROMPTS[0])], PROMPTS[:1])

    async def act(tunnel):
        await asyncio.to_thread(change, cluster.engine(tunnel.proxy.name))

    with cluster.lying_in_wait(role, trap := Trap(moment, act)):
        answer = cluster.ask(PROMPTS[0])
    assert trap.caught.done()
    return matrix.ends([answer], PROMPTS[:1])


@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.value)
@pytest.mark.parametrize("role", ROLES)
def test_a_worker_is_removed_and_added(matrix, role, moment):
    cluster, changed = matrix.cluster, []

    def take_out(engine):
        changed.append(engine)
        remove(cluster, engine)

    assert during(matrix, role, moment, take_out) == ["served"]
    engine = changed[0]
    wait_until(lambda: named(cluster, engine) is None, what="the end of the removed worker")
    assert not used(cluster, engine)
    wait_until(cluster.nothing_held, what="the end of all load")
    assert during(matrix, role, moment, lambda _: add(cluster, engine)) == ["served"]
    wait_until(lambda: used(cluster, engine), what="a request at the added worker")
    wait_until(cluster.nothing_held, what="the end of all load")
