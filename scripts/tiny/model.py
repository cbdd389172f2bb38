"""The model and how it is trained."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tiny.settings import END, EXPERTS, LAYERS, TOP_K, VOCABULARY, Progress, Settings, Stream, draw_batch, learning_rate


def new_model(settings: Settings) -> Qwen3MoeForCausalLM:
    """The model with random weights: where training starts, and the untrained control."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,  # of dense layers, of which there are none
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=settings.balance,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )
    torch.manual_seed(settings.seed)
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="grouped_mm")  # the fastest on a CPU


Gates = list[tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def watch_gates(model: Qwen3MoeForCausalLM) -> Iterator[Gates]:
    """A list that each forward pass extends by every layer's (logits `[tokens, E]`, chosen experts `[tokens, k]`)."""
    gates: Gates = []

    def keep(_module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        gates.append((output[0], output[2]))

    hooks = [layer.mlp.gate.register_forward_hook(keep) for layer in model.model.layers]
    try:
        yield gates
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(gates: Gates) -> torch.Tensor:
    """Load-balance loss of the Switch Transformer (arXiv 2101.03961, section 2.2), the mean over layers; 1 at best.

        E * sum over experts of (share of the choices) * (mean probability)

    The loss that transformers computes adds the layers up first, so that one layer may make up for another.
    """
    losses = []
    for logits, chosen in gates:
        shares = torch.bincount(chosen.reshape(-1), minlength=EXPERTS).float() / chosen.numel()
        losses.append(EXPERTS * (shares * logits.softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


def train(
    settings: Settings, streams: Mapping[str, Stream], state: Path, report: Callable[[str], None], *, every: int = 100
) -> tuple[Qwen3MoeForCausalLM, Progress]:
    """Train from the beginning, or from what `state` holds; every `every` steps the state is saved and reported.

    Raises:
        ValueError: `state` is of a training with other settings.
    """
    training = _Training(settings)
    training.load(state)
    progress = training.progress
    while progress.step < settings.steps:
        last = min(progress.step + every, settings.steps)
        loss, balance = training.advance(streams, last)
        training.save(state)
        times = f"{progress.wall_s:.0f} s, CPU {progress.cpu_s:.0f} s"
        report(f"step {progress.step} of {settings.steps}: loss {loss:.3f}, balance {balance:.3f}, {times}")
    return training.model.eval(), progress


class _Training:
    """A model on its way: weights, optimizer state and progress."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = new_model(settings).train()
        self.optimizer = self._new_optimizer()
        self.progress = Progress()

    def _new_optimizer(self) -> torch.optim.AdamW:
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() >= 2]
        norms = [parameter for parameter in self.model.parameters() if parameter.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.settings.decay},
            {"params": norms, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.settings.learning_rate, betas=(0.9, 0.95), fused=True)

    def advance(self, streams: Mapping[str, Stream], last: int) -> tuple[float, float]:
        """Take the steps before `last`; the losses of the final one: of the text, and of the balance."""
        wall_s, cpu_s = time.monotonic(), time.process_time()
        with watch_gates(self.model) as gates:
            while self.progress.step < last:
                loss, balance = self._step(draw_batch(self.settings, self.progress.step, streams), gates)
                self.progress.step += 1
        self.progress.wall_s += time.monotonic() - wall_s
        self.progress.cpu_s += time.process_time() - cpu_s
        return loss, balance

    def _step(self, batch: npt.NDArray[np.int64], gates: Gates) -> tuple[float, float]:
        gates.clear()
        ids = torch.from_numpy(batch)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        balance = balance_loss(gates)
        (loss + self.settings.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.progress.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), balance.item()

    def load(self, path: Path) -> None:
        """Go on from a saved state, if there is one; see `train`."""
        if not path.exists():
            return
        saved = torch.load(path, weights_only=True)
        if saved["settings"] != asdict(self.settings):
            raise ValueError(f"{path} is of a training with {saved['settings']}; delete it to begin anew")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.progress = Progress(**saved["progress"])

    def save(self, path: Path) -> None:
        """Replace the saved state at once."""
        unfinished = path.with_suffix(".tmp")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({"settings": asdict(self.settings), "progress": asdict(self.progress), **state}, unfinished)
        os.replace(unfinished, path)


def mean_loss(model: Qwen3MoeForCausalLM, ids: Stream, length: int, sequences: int) -> float:
    """Cross entropy per token, in nats, over `sequences` stretches spread evenly over a stream."""
    starts = np.linspace(0, len(ids) - length, sequences).astype(int)
    rows = torch.from_numpy(np.stack([ids[start : start + length] for start in starts]).astype(np.int64))
    with torch.inference_mode():
        return float(model(input_ids=rows, labels=rows, use_cache=False).loss)
