"""The model card, written from what was measured into `model_card.md.in`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiny.measures import BATCH, CLUSTERS, SPLITS, Locality, Statistics
from tiny.settings import EXPERTS, LAYERS, TEMPERATURE, TOP_K, VOCABULARY, Progress, Settings
from tiny.sources import DOMAINS, SOURCES, Source

_TEMPLATE = Path(__file__).with_name("model_card.md.in")


@dataclass(frozen=True, slots=True)
class Loss:
    """Cross entropy per token, in nats, of one domain."""

    train: float
    held: float


@dataclass(frozen=True, slots=True)
class Run:
    """All that the card says.

    Attributes:
        settings: of the training.
        progress: of the training.
        versions: of the libraries, in words.
        parameters: of the model.
        documents: training and held-out documents of each domain.
        losses: of the trained model, by domain.
        prompts: held-out prompts of each domain, of `settings.length` tokens.
        outputs: output tokens counted of each.
        trained: figures of the model.
        untrained: figures of the same configuration before its first step.
    """

    settings: Settings
    progress: Progress
    versions: str
    parameters: int
    documents: Mapping[str, tuple[int, int]]
    losses: Mapping[str, Loss]
    prompts: int
    outputs: int
    trained: Statistics
    untrained: Statistics


def write_card(run: Run) -> str:
    """The card, as Markdown."""
    settings = run.settings
    return _TEMPLATE.read_text().format(
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
        vocabulary=VOCABULARY,
        temperature=TEMPERATURE,
        batch=BATCH,
        parameters=run.parameters / 1e6,
        prompts=run.prompts,
        outputs=run.outputs,
        statistics=statistics_table(run.trained, run.untrained),
        steps=settings.steps,
        sequences=settings.batch,
        length=settings.length,
        tokens=settings.steps * settings.batch * settings.length / 1e6,
        wall_min=run.progress.wall_s / 60,
        cpu_min=run.progress.cpu_s / 60,
        versions=run.versions,
        decay=settings.decay,
        rate=settings.learning_rate,
        warmup=settings.warmup,
        balance=settings.balance,
        seed=settings.seed,
        losses="\n".join(_loss(name, *run.documents[name], loss) for name, loss in run.losses.items()),
        sources="\n".join(map(_source, SOURCES)),
    )


def statistics_table(trained: Statistics, untrained: Statistics) -> str:
    """The routing figures of both models, as a Markdown table."""
    columns = zip(_figures(trained), _figures(untrained), strict=True)
    rows = [f"| {name} | {left} | {right} |" for (name, left), (_, right) in columns]
    return "\n".join(["| | trained | untrained |", "|---|---|---|", *rows])


def _figures(found: Statistics) -> list[tuple[str, str]]:
    purity = f"{found.purity:.2f}, {found.purity_least:.2f}"
    return [
        ("fewer active experts, tasks: one domain, mixed", _locality(found.tasks)),
        ("fewer active experts, languages: one domain, mixed", _locality(found.languages)),
        ("fewer active experts, all: one domain, mixed", _locality(found.everything)),
        *((f"active experts in batches of `{name}`", f"{found.by_domain[name]:.1f}") for name in DOMAINS),
        (f"purity of K = {CLUSTERS} clusters: mean and least of {SPLITS} divisions", purity),
        ("r of prefill with own decode, with another's", f"{found.own:.2f}, {found.other:.2f}"),
        *((f"rho of `{kind}` signatures", f"{rho:.2f}") for kind, rho in found.rho.items()),
        ("use of a layer's busiest expert over the mean", f"{found.load:.1f}"),
        ("experts that no output token chose", f"{found.unused} of {LAYERS * EXPERTS}"),
    ]


def _locality(found: Locality) -> str:
    return f"{found.reduction:.1%}: {found.same:.1f}, {found.mixed:.1f}"


def _loss(name: str, train: int, held: int, loss: Loss) -> str:
    return f"| `{name}` | {train} | {held} | {loss.train:.2f} | {loss.held:.2f} |"


def _source(source: Source) -> str:
    package = f"`{source.package}` {source.version}, `{source.sha256}`"
    return f"| `{source.domain}` | {source.work} | {source.licence} | {package} |"
