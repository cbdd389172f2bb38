#!/usr/bin/env python3
"""What layer selection and rho cost, beside the same selection by plain ranking.

    python3 bench/quality.py [--json]

Requests are made up: 16 domains favour experts of their own.  All times are CPU seconds of one thread.  The plain way
makes the same trials from the same sums over layers, and ranks each with scipy.stats.rankdata; both must choose alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when numpy is loaded

import numpy as np
from scipy.stats import rankdata

from coterie.quality import DEFAULT_PAIRS, cosines, random_pairs, select_layers, signature_quality

SIZES = ((1_000, 48, 128), (1_000, 94, 128), (20_000, 48, 128))
DOMAINS = 16
PLAIN_UP_TO = 50  # layers; the plain way takes minutes beyond


def made_up(requests: int, layers: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of prompts and of outputs, `[N, L, E]`."""
    rng = np.random.default_rng(0)
    centres = rng.gamma(0.3, size=(DOMAINS, layers, experts)).astype(np.float32)
    domains = rng.integers(DOMAINS, size=requests)
    prompts = np.empty((requests, layers, experts), np.uint16)
    outputs = np.empty_like(prompts)
    for i, domain in enumerate(domains):
        activity = centres[domain] * rng.standard_gamma(1, centres[0].shape, np.float32)
        prompts[i] = rng.poisson(10 * activity)
        outputs[i] = rng.poisson(3 * activity * rng.standard_gamma(1, activity.shape, np.float32))
    return prompts, outputs


def cpu_seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


def peak_mib(call: Callable[[], Any]) -> float:
    """Memory that the call takes beside its input, at most."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / (1 << 20)


def plain_selection(features: np.ndarray, decode: np.ndarray, pairs: np.ndarray) -> tuple[int, ...]:
    """The layers chosen, ascending."""
    target = rankdata(cosines(decode, pairs))
    i, j = pairs.T
    layers = [features[:, layer].astype(np.float64) for layer in range(features.shape[1])]
    dots = [np.einsum("pe,pe->p", layer[i], layer[j]) for layer in layers]
    squares = [np.einsum("ne,ne->n", layer, layer) for layer in layers]

    def rho(chosen: list[int]) -> float:
        norms = np.sqrt(sum(squares[n] for n in chosen))
        found = sum(dots[n] for n in chosen) / (norms[i] * norms[j])
        return float(np.corrcoef(rankdata(np.rint(found * 2**30)), target)[0, 1])

    order: list[int] = []
    curve: list[float] = []
    while len(order) < len(layers):
        rhos = {n: rho([*order, n]) for n in range(len(layers)) if n not in order}
        order.append(max(rhos, key=rhos.__getitem__))
        curve.append(rhos[order[-1]])
    return tuple(sorted(order[: curve.index(max(curve)) + 1]))


def measure(requests: int, layers: int, experts: int) -> dict[str, Any]:
    prompts, outputs = made_up(requests, layers, experts)
    features = prompts.astype(np.float32)
    pairs = random_pairs(requests, DEFAULT_PAIRS, np.random.default_rng(0))
    runs = [cpu_seconds(lambda: select_layers(features, outputs, pairs)) for _ in range(3)]
    memory = peak_mib(lambda: select_layers(features, outputs, pairs))
    rho, rho_s = cpu_seconds(lambda: signature_quality(features, outputs, pairs, np.random.default_rng(0)))
    found: dict[str, Any] = {
        "requests": requests, "layers": layers, "experts": experts, "pairs": len(pairs),
        "select_cpu_s": min(seconds for _, seconds in runs), "select_peak_mib": memory,
        "rho": rho.value, "rho_low": rho.low, "rho_high": rho.high, "rho_cpu_s": rho_s,
    }  # fmt: skip
    if requests <= 1_000 and layers <= PLAIN_UP_TO:
        plain, found["plain_cpu_s"] = cpu_seconds(lambda: plain_selection(features, outputs, pairs))
        found["same_layers"] = plain == runs[0][0].layers
    return found


def as_table(report: dict[str, Any]) -> str:
    head = f"{'N x L x E':>18}{'select (s)':>12}{'plain (s)':>11}{'rho (s)':>9}{'peak (MiB)':>12}   rho"
    return "\n".join([report["machine"], head, *map(as_line, report["sizes"])])


def as_line(row: dict[str, Any]) -> str:
    size = f"{row['requests']} x {row['layers']} x {row['experts']}"
    plain = f"{row['plain_cpu_s']:.2f}" if "plain_cpu_s" in row else "-"
    rho = f"{row['rho']:.3f} [{row['rho_low']:.3f}, {row['rho_high']:.3f}]"
    times = f"{row['select_cpu_s']:12.2f}{plain:>11}{row['rho_cpu_s']:9.2f}"
    return f"{size:>18}{times}{row['select_peak_mib']:12.0f}   {rho}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    report = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "sizes": [measure(*size) for size in SIZES],
    }
    print(json.dumps(report, indent=2) if as_json else as_table(report))


if __name__ == "__main__":
    main()
