"""Cases on which placements are compared with the public EPLB, made from seeds."""

from dataclasses import dataclass

import numpy as np

from coterie.placement import Placement, balance, balance_by_node

CASES = 1000


@dataclass(frozen=True)
class Case:
    """Slots are the same for each rank; nodes is 1 for the global policy."""

    load: np.ndarray  # [L, E]
    slots: int
    ranks: int
    groups: int
    nodes: int


def case(seed: int) -> Case:
    """1 to 4 nodes of 2 to 8 ranks, up to 128 experts, up to half as many spare slots; four shapes of load."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.choice([1, 1, 2, 4]))
    ranks = max(4, nodes * int(rng.choice([2, 4, 8])))
    groups = nodes * int(rng.choice([1, 2, 4]))
    experts = int(rng.choice([16, 32, 48, 64, 96, 128]))
    while experts % groups or experts < 2 * ranks:
        experts += 16
    least = -(-experts // ranks)
    slots = least + int(rng.integers(0, max(1, least // 2) + 1))
    return Case(_load(rng, (int(rng.integers(1, 3)), experts)), slots, ranks, groups, nodes)


def _load(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Tokens of each expert: log-normal, uniform, by a power of the expert's place, or gamma."""
    shapes = [
        lambda: rng.lognormal(0, rng.uniform(0.3, 1.5), shape) * 1000,
        lambda: rng.uniform(1, 1000, shape),
        lambda: 1e5 / (1 + np.argsort(rng.random(shape), axis=1)) ** rng.uniform(0.3, 1.2),
        lambda: rng.gamma(rng.uniform(0.3, 3), 1000, shape),
    ]
    return np.ceil(shapes[rng.integers(len(shapes))]()).astype(np.int64)


def place(case: Case) -> Placement:
    slots = [case.slots] * case.ranks
    if case.nodes == 1:
        return balance(case.load, slots)
    return balance_by_node(case.load, slots, groups=case.groups, nodes=case.nodes)
