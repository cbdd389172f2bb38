"""Counts, ids and gate sums from a Hugging Face checkpoint, run here with transformers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coterie.activations import TraceRecord
from coterie.calibration.prompts import Prompt
from coterie.calibration.sources.loading import CheckpointOptions, Loaded, load
from coterie.calibration.sources.routers import Routers, find_routers, listening
from coterie.calibration.sources.tape import Tape
from coterie.core import ExpertCounts
from coterie.errors import EngineError, InputError
from coterie.wire import Ids, count_ids


class CheckpointSource:
    """A `Source`: runs prompts one after another, greedy and with a KV cache, and hears what the routers choose.

    All of torch runs in one worker thread, so that Ctrl-C is heard: it ends the text that is running after the
    token at hand, and a model that is loading when it is loaded.

    Args:
        options: which checkpoint, and how to run it.
        notice: told when loading begins and ends.
        model: name of the model for the trace; None takes the folder's name, or the name on the hub.

    Attributes:
        records: see `Source`; whole once the model is loaded.
    """

    def __init__(self, options: CheckpointOptions, *, notice: Callable[[str], None], model: str | None = None) -> None:
        folder = Path(options.checkpoint)
        self._options = options
        self._identity = str(folder.resolve()) if folder.is_dir() else options.checkpoint
        self.records = f"counts, ids and gates by transformers from {self._identity}"
        self._name = model or (folder.resolve().name if folder.is_dir() else options.checkpoint)
        self._notice = notice
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coterie-torch")
        self._runner: _Runner | None = None

    async def model(self) -> str:
        """See `Source`."""
        return self._name

    async def record(self, prompt: Prompt, max_tokens: int) -> TraceRecord:
        """See `Source`."""
        run = self._loaded().run
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run, prompt, max_tokens)
        except (InputError, RuntimeError) as error:  # torch's own, such as out of memory, are RuntimeErrors
            raise EngineError(f"{prompt.where}: {error}") from None

    async def __aenter__(self) -> Self:
        self._notice(f"loading {self._options.checkpoint}")
        try:
            self._runner = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        except BaseException:
            self._end()
            raise
        self._tell(self._runner.loaded, self._runner.routers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _tell(self, loaded: Loaded, routers: Routers) -> None:
        """Say what is recorded, now that it is known."""
        how = f"{loaded.dtype} on {loaded.device}"
        gates = "gate probabilities and logits" if routers.scoring else "gate logits"
        self.records = f"counts, ids, {gates} by transformers from {self._identity} in {how}"
        self._notice(f"{self._name}: {routers.geometry}, {how}")
        if routers.scoring is None:
            self._notice("gate probabilities are not recorded: how this architecture scores could not be told")

    def _load(self) -> _Runner:
        loaded = load(self._options)
        return _Runner(loaded, find_routers(loaded.model), self._stop)

    def _loaded(self) -> _Runner:
        assert self._runner is not None, "enter the source first"
        return self._runner

    def _end(self) -> None:
        self._stop.set()
        self._runner = None
        self._thread.shutdown(wait=False, cancel_futures=True)


class _Runner:
    """Runs one prompt; in the worker thread."""

    def __init__(self, loaded: Loaded, routers: Routers, stop: threading.Event) -> None:
        self.loaded = loaded
        self.routers = routers
        self._stop = stop

    def run(self, prompt: Prompt, max_tokens: int) -> TraceRecord:
        ids = self.loaded.tokenize(prompt)
        _check_length(len(ids), max_tokens, self.loaded.context)
        text, output = Tape(self.routers, gates=True), Tape(self.routers)
        self._generate(ids, max_tokens, text, output)
        decode_ids = output.ids()
        return TraceRecord(
            self._count(text.ids()),
            self._count(decode_ids),
            max_tokens,
            prompt.hash,
            prompt.label,
            decode_ids=decode_ids,
            gate_prob=text.gate_sums("prob"),
            gate_logit=text.gate_sums("logit"),
        )

    def _count(self, ids: Ids) -> ExpertCounts:
        geometry = self.routers.geometry
        return ExpertCounts(geometry, count_ids(ids, geometry.experts), tokens=len(ids), covered=len(ids))

    def _generate(self, ids: list[int], max_tokens: int, text: Tape, output: Tape) -> None:
        """Greedy: the prompt in one pass, then token by token; the last one sampled is not forwarded."""
        import torch

        with torch.inference_mode():
            with listening(self.routers.layers, text):
                step = self._forward(torch.tensor([ids], device=self.loaded.device), None)
            with listening(self.routers.layers, output):
                for _ in range(max_tokens - 1):
                    if self._stop.is_set():
                        raise EngineError("stopped")
                    step = self._forward(step.logits[:, -1].argmax(-1, keepdim=True), step.past_key_values)

    def _forward(self, tokens: Any, cache: Any) -> Any:
        return self.loaded.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _check_length(tokens: int, max_tokens: int, context: int | None) -> None:
    if not tokens:
        raise InputError("the prompt has no tokens")
    if context is not None and tokens + max_tokens > context:
        raise InputError(
            f"the prompt's {tokens} tokens and {max_tokens} output tokens are more than the {context} that the "
            "model's context holds; shorten it, or pass a smaller --max-tokens"
        )
