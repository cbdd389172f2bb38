"""The model card, from made-up figures."""

from __future__ import annotations

from dataclasses import replace

from tiny.card import Loss, Run, statistics_table, write_card
from tiny.measures import Locality, Statistics, shortfalls
from tiny.settings import Progress, Settings
from tiny.sources import DOMAINS, SOURCES

GOOD = Statistics(
    tasks=Locality(same=36.0, mixed=45.0, reduction=0.2),
    languages=Locality(same=33.0, mixed=44.0, reduction=0.25),
    everything=Locality(same=35.0, mixed=50.0, reduction=0.3),
    by_domain={name: 30.0 + i for i, name in enumerate(DOMAINS)},
    purity=0.9,
    purity_least=0.85,
    own=0.8,
    other=0.1,
    rho={"count": 0.7},
    load=2.5,
    unused=0,
)
POOR = replace(GOOD, tasks=Locality(44.0, 45.0, 0.022), purity=0.3)
RUN = Run(
    settings=Settings(steps=3000, batch=8, length=256),
    progress=Progress(step=3000, wall_s=1800.0, cpu_s=1500.0),
    versions="torch 1, transformers 2",
    parameters=8_680_000,
    documents=dict.fromkeys(DOMAINS, (100, 10)),
    losses={name: Loss(2.5, 3.0) for name in DOMAINS},
    prompts=64,
    outputs=64,
    trained=GOOD,
    untrained=POOR,
)


def test_the_card_fills_every_field() -> None:
    card = write_card(RUN)
    assert "{" not in card
    assert "3,000 steps of 8 x 256 tokens, 6.14 M tokens in all" in card  # 3000 * 2048 = 6,144,000
    assert "30 minutes, 25 of CPU time" in card
    assert "| `code` | 100 | 10 | 2.50 | 3.00 |" in card
    assert all(source.sha256 in card for source in SOURCES)


def test_the_table_sets_both_models_side_by_side() -> None:
    assert (
        "| fewer active experts, tasks: one domain, mixed | 20.0%: 36.0, 45.0 | 2.2%: 44.0, 45.0 |"
        in statistics_table(GOOD, POOR)
    )


def test_a_model_below_a_bar_is_told_which() -> None:
    assert shortfalls(GOOD) == []
    assert shortfalls(POOR) == ["reduction of tasks is 0.022, less than 0.15", "purity is 0.300, less than 0.75"]
