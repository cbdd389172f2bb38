#!/usr/bin/env python3
"""Whether locality routing still pays when decode workers share a pool of expert servers.

    python3 bench/expert_pool.py [MODEL] [--workers 4] [--repeats 3] [--json FILE]

The decode workers have no experts; as many expert servers have them, and only decode workers ask these.  The prompts of
examples/demo, all domains at once, are served through the gateway under each policy, the same ones under all.  Experts
are placed in three ways, with a cluster for each:

    by number        server s has the s-th part of the experts' numbers, which say nothing of domains
    by domain        of each layer, server s has the experts that prompts of cluster s use most, as many as any other;
                     clusters are those of the profile that `locality` routes by
    by number twice  as the first, each expert on two servers

Experts are widened with zeros (`--pad`), so that computing one costs what reading it costs.  Counted is what happened
from the first request of a round to the last.  Times are of a machine whose cores all processes share; counts are not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from expert_memory import running
from expert_server import cpu_s
from safetensors.numpy import save_file

from coterie.clustering import balanced_assignment
from coterie.modeling.checkpoint import open_files
from coterie.modeling.tiles import Floats
from coterie.up.cluster import Cluster
from coterie.up.config import ClusterConfig, ExpertsConfig, PoolConfig
from coterie.up.demo import DemoOptions, DemoResult, draw_schedule, run_demo
from coterie.up.demo.results import PassResult, measure
from coterie.up.experts_command import expert_shares

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "examples" / "demo"
COUNTED = ("merged", "batches", "tokens", "active", "busy_s")
COLUMNS = {
    "tpot_ms": "TPOT p50, ms",
    "live": "requests a step",
    "experts": "experts a step",
    "servers": "servers a call",
    "requests": "requests a batch",
    "tokens": "tokens a batch",
    "active": "experts a batch",
    "pairs": "tokens an expert",
    "reads": "experts read a token",
    "busy_ms": "computing a token, ms",
    "cpu_ms": "servers' CPU a token, ms",
    "imbalance": "busiest over mean",
}


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """What servers have done since they started, `[S]` of each."""

    counts: dict[str, Floats]

    @classmethod
    def by(cls, servers: Sequence[tuple[str, int]]) -> Done:
        """Of servers, by URL and process."""
        loads = [httpx.get(f"{url}/load").json() for url, _ in servers]
        counts = {name: np.array([load[name] for load in loads]) for name in COUNTED}
        counts["pairs"] = np.array([np.sum(load["load"]) for load in loads])
        counts["cpu_s"] = np.array([cpu_s(process) for _, process in servers])
        return cls(counts)

    def since(self, before: Done) -> Done:
        """What they have done since."""
        return Done({name: values - before.counts[name] for name, values in self.counts.items()})


@dataclass
class Recorder:
    """Is told how a run goes, and notes before each pass what the servers have done."""

    servers: Sequence[tuple[str, int]]
    notes: list[Done] = field(default_factory=list)

    def detail(self, text: str) -> None:
        """A pass begins."""
        self.notes.append(Done.by(self.servers))
        print(f"  {text}", file=sys.stderr)

    def step(self, title: str) -> None:
        """A step begins."""
        print(f"  {title}", file=sys.stderr)

    def begin(self, total: int, done: int) -> None:
        """Nothing is shown of it."""

    def advance(self) -> None:
        """Nothing is shown of it."""

    def notice(self, text: str) -> None:
        """Say something to a person."""
        print(f"  {text}", file=sys.stderr)

    def passes(self) -> list[Done]:
        """What the servers did in each pass."""
        ends = [*self.notes[1:], Done.by(self.servers)]
        return [after.since(before) for before, after in zip(self.notes, ends, strict=True)]


def padded(model: Path, folder: Path, size: int) -> Path:
    """The checkpoint with zeros behind each expert's own columns, in float32."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "moe_intermediate_size": size}))
    tensors = {name: file.floats(name) for name, file in open_files(model).items()}
    for name, values in tensors.items():
        if ".experts." in name:
            more = size - fields["moe_intermediate_size"]
            tensors[name] = np.pad(values, ((0, 0), (0, more)) if "down_proj" in name else ((0, more), (0, 0)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def few(prompts: Path, file: Path, each: int = 16) -> Path:
    """A file of so many prompts of each domain: enough for clusters of domains."""
    taken: Counter[str] = Counter()
    with file.open("w") as out:
        for line in prompts.open():
            label = json.loads(line)["label"]
            taken[label] += 1
            if taken[label] <= each:
                out.write(line)
    return file


def by_domain(result: DemoResult) -> list[str]:
    """Which experts each server has, as `coterie experts serve` is told, by what clusters of prompts use."""
    trace, profile = result.trace, result.profile
    of_label = [trace.prefill[np.array(trace.labels) == label].mean(axis=0) for label in profile.label_names]
    used = np.einsum("km,mle->lek", profile.label_counts.astype(float), np.stack(of_label))
    shares = used / np.maximum(used.sum(axis=2, keepdims=True), 1e-9)
    owners = [balanced_assignment(layer, -(-len(layer) // profile.clusters)) for layer in shares]
    return [
        ";".join(f"{layer}:{','.join(map(str, np.flatnonzero(own == k)))}" for layer, own in enumerate(owners))
        for k in range(profile.clusters)
    ]


@contextlib.contextmanager
def pool(model: Path, shares: Sequence[str]) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """The URL of a monitor, and its servers as URL and process."""
    with contextlib.ExitStack() as stack:
        _, monitor = stack.enter_context(running("experts", "monitor", "--port", "0"))
        options = ("--monitor", monitor, "--port", "0")
        servers: list[tuple[subprocess.Popen[str], str]] = [
            stack.enter_context(running("experts", "serve", model, "--experts", share, *options)) for share in shares
        ]
        yield monitor, [(url, process.pid) for process, url in servers]


def serve(model: Path, shares: Sequence[str], options: DemoOptions, run_dir: Path) -> tuple[DemoResult, list[Done]]:
    """All policies on one placement; what the servers did in each pass of the result."""
    with pool(model, shares) as (monitor, servers):
        decode = PoolConfig(len(shares), ("--kv-memory", "64", "--experts-from", monitor))
        config = ClusterConfig(
            str(model),
            "tiny",
            prefill=PoolConfig(1, ("--kv-memory", "128")),
            decode=decode,
            engine_env=run_dir,
            run_dir=run_dir,
            engine="embedded",
        )
        recorder = Recorder(servers)
        with Cluster(config) as cluster:
            result = run_demo(cluster, options, draw_schedule(options), recorder)
            return result, recorder.passes()


def figures(passes: Sequence[PassResult], done: Sequence[Done], layers: int) -> dict[str, float]:
    """Of one policy in one repeat; see `COLUMNS`."""
    own = measure(passes)
    steps = sum(one.counted.steps for one in passes if one.counted)
    rows = sum(one.counted.rows for one in passes if one.counted)
    by_server = {name: np.sum([one.counts[name] for one in done], axis=0) for name in done[0].counts}
    total = {name: float(values.sum()) for name, values in by_server.items()}
    return {
        "tpot_ms": own.tpot_p50_ms or np.nan,
        "live": own.live_mean or np.nan,
        "experts": own.active_experts_mean or np.nan,
        "servers": total["merged"] / (steps * layers),
        "requests": total["merged"] / total["batches"],
        "tokens": total["tokens"] / total["batches"],
        "active": total["active"] / total["batches"],
        "pairs": total["pairs"] / total["active"],
        "reads": total["active"] / (rows * layers),
        "busy_ms": 1e3 * total["busy_s"] / rows,
        "cpu_ms": 1e3 * total["cpu_s"] / rows,
        "imbalance": float(by_server["pairs"].max() / by_server["pairs"].mean()),
        "failed": float(sum(served.error is not None for one in passes for served in one.served)),
    }


def rows_of(placement: str, result: DemoResult, done: Sequence[Done]) -> Iterator[dict[str, object]]:
    """A row for each policy and repeat."""
    layers = result.trace.geometry.layers
    cells = {(one.planned.policy, one.planned.repeat): ([], []) for one in result.passes}
    for one, by_servers in zip(result.passes, done, strict=True):
        passes, own = cells[one.planned.policy, one.planned.repeat]
        passes.append(one)
        own.append(by_servers)
    for (policy, repeat), (passes, own) in cells.items():
        yield {"placement": placement, "policy": policy, "repeat": repeat, **figures(passes, own, layers)}


def show(rows: Sequence[dict[str, object]]) -> None:
    """A table for each placement, and one for all: median over the repeats, and the lowest and highest."""
    for placement in dict.fromkeys(row["placement"] for row in rows):
        table(str(placement), [row for row in rows if row["placement"] == placement])
    table("all placements", rows)


def table(title: str, rows: Sequence[dict[str, object]]) -> None:
    """A column for each policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    print(f"\n{title:26}" + "".join(f"{policy:>26}" for policy in policies))
    for name, what in COLUMNS.items():
        cells = [np.array([row[name] for row in rows if row["policy"] == policy]) for policy in policies]
        texts = [f"{np.median(cell):.2f} ({cell.min():.2f}-{cell.max():.2f})" for cell in cells]
        print(f"{what:26}" + "".join(f"{text:>26}" for text in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "models" / "coterie-tiny")
    parser.add_argument("--policies", default="round_robin,least_load,locality,marginal")
    parser.add_argument("--json", type=Path)
    sizes = {"workers": 4, "pad": 1024, "repeats": 3, "rounds": 1, "requests": 192, "concurrency": 64, "max-tokens": 24}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = DemoOptions(
            few(PROMPTS / "calibrate.jsonl", Path(folder, "calibrate.jsonl")),
            PROMPTS / "serve.jsonl",
            **{name: getattr(given, name) for name in ("requests", "concurrency", "max_tokens", "rounds", "repeats")},
            policies=tuple(given.policies.split(",")),
            mixes=("even",),
        )
        rows = list(measured(padded(given.model, Path(folder, "model"), given.pad), given.workers, options, folder))
    show(rows)
    if given.json:
        given.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if failed := sum(row["failed"] for row in rows):
        sys.exit(f"{failed:g} requests failed")


def measured(model: Path, workers: int, options: DemoOptions, folder: str) -> Iterator[dict[str, object]]:
    """Rows of all placements."""
    once, twice = (expert_shares(ExpertsConfig(workers, replicas), str(model)) for replicas in (1, 2))
    result, done = serve(model, once, options, Path(folder, "once"))
    yield from rows_of("by number", result, done)
    for placement, shares in {"by domain": by_domain(result), "by number twice": twice}.items():
        yield from rows_of(placement, *serve(model, shares, options, Path(folder, placement.replace(" ", "-"))))


if __name__ == "__main__":
    main()
