#!/usr/bin/env python3
"""Placements beside those of the public EPLB: imbalance on 1,000 made-up cases, and time.

    git clone https://github.com/deepseek-ai/EPLB
    python3 bench/eplb.py --peer EPLB/eplb.py [--write tests/fixtures/eplb.json]

Needs torch, for the peer.  Imbalance is the load of the busiest rank over that of the mean rank, by layer.  The peer's
replicas of an expert share its load evenly, and some are on one rank; ours share it as the placement says, and none
are.  Times are CPU time of this process, on one thread.  `--write` stores the peer's imbalances, for the tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from coterie.placement import Placement
from placement_cases import CASES, Case, case, place

LARGE = Case(np.random.default_rng(0).lognormal(0, 1, (58, 256)), slots=9, ranks=32, groups=8, nodes=4)
"""DeepSeek-V3's MoE layers and experts on 4 nodes of 8, with 32 spare slots, as its authors serve prefill."""
ROUNDING = 1e-6


def load_peer(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("eplb", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def place_as_peer(peer: ModuleType, case: Case) -> np.ndarray:
    """`[L, S]` expert of each slot."""
    load = torch.from_numpy(case.load)
    held, _, _ = peer.rebalance_experts(load, case.slots * case.ranks, case.groups, case.nodes, case.ranks)
    return held.numpy()


def peer_imbalance(case: Case, held: np.ndarray) -> np.ndarray:
    replicas = np.stack([np.bincount(layer, minlength=case.load.shape[1]) for layer in held])
    of_slot = np.take_along_axis(case.load / replicas, held, axis=1)
    loads = of_slot.reshape(len(held), case.ranks, case.slots).sum(axis=2)
    return loads.max(axis=1) / loads.mean(axis=1)


def shared_evenly(placement: Placement) -> Placement:
    return replace(placement, shares=1 / np.take_along_axis(placement.replicas, placement.experts, axis=1))


def timed(action):
    start = time.process_time()
    return action(), time.process_time() - start


def compare(peer: ModuleType, cases: list[Case]) -> dict[str, object]:
    ours_s = peer_s = 0.0
    worse = worse_evenly = doubled = 0
    gains, theirs = [], []
    for one in cases:
        held, spent = timed(lambda one=one: place_as_peer(peer, one))
        peer_s += spent
        placement, spent = timed(lambda one=one: place(one))
        ours_s += spent
        reference = peer_imbalance(one, held)
        theirs.append(reference.round(7).tolist())
        gains += (reference / placement.imbalance(one.load)).tolist()
        worse += bool((placement.imbalance(one.load) > reference + ROUNDING).any())
        worse_evenly += bool((shared_evenly(placement).imbalance(one.load) > reference + ROUNDING).any())
        doubled += any(len(set(rank)) < one.slots for rank in held.reshape(-1, one.slots).tolist())
    return {
        "cases": len(cases),
        "worse than the peer": worse,
        "worse than the peer, if ours shared evenly": worse_evenly,
        "peer has replicas on one rank": doubled,
        "peer's imbalance over ours, mean": round(statistics.mean(gains), 4),
        "CPU s, ours and peer's": [round(ours_s, 2), round(peer_s, 2)],
        "time ratio": round(ours_s / peer_s, 2),
        "imbalance": theirs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peer = load_peer(arguments.peer)
    for name, cases in {"58 x 256": [LARGE], "random": [case(seed) for seed in range(CASES)]}.items():
        result = compare(peer, cases)
        imbalance = result.pop("imbalance")
        print(json.dumps({name: result}, indent=2))
    if arguments.write:
        source = "eplb.py of https://github.com/deepseek-ai/EPLB (MIT), by bench/eplb.py"
        arguments.write.write_text(json.dumps({"source": source, "imbalance": imbalance}) + "\n")


if __name__ == "__main__":
    main()
