"""Load a checkpoint and its tokenizer with transformers: safetensors only, and no code of the checkpoint's own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.calibration.prompts import Prompt
from coterie.errors import InputError, UnsupportedError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_SAID_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Which checkpoint, and how to run it.

    Attributes:
        checkpoint: a folder, or a name on the Hugging Face hub.
        device: one of `DEVICES`; `auto` is `cuda` where torch sees a GPU.
        dtype: one of `DTYPES`; `auto` is the checkpoint's own.
    """

    checkpoint: str
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model that is ready to run.

    Attributes:
        model: transformers model, in evaluation mode.
        tokenizer: its tokenizer.
        device: `cpu` or `cuda`.
        dtype: such as `bfloat16`.
        context: tokens that it can hold; None where its config does not say.
    """

    model: Any
    tokenizer: Any
    device: str
    dtype: str
    context: int | None

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, as vLLM's server makes them.

        Raises:
            InputError: a message that is not text, or the checkpoint's template does not take the chat.
        """
        if prompt.text is not None:
            return list(self.tokenizer(prompt.text)["input_ids"])
        assert prompt.messages is not None
        if any(not isinstance(message.get("content"), str) for message in prompt.messages):
            raise InputError("a message's content is not one string; a checkpoint's template is given text only")
        try:
            chat = self.tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # the template is the checkpoint's own program and may raise anything
            raise InputError(f"the checkpoint's chat template does not take it: {error}") from None
        return list(chat["input_ids"])


def load(options: CheckpointOptions) -> Loaded:
    """Load a checkpoint.

    Raises:
        InputError: it cannot be loaded, lacks weights, or the device is not there.
        UnsupportedError: torch or transformers is missing or too old.
    """
    _check_place(options.checkpoint)
    torch, transformers = _libraries()
    device = _device(options.device, torch)
    try:
        with _quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(options.checkpoint, trust_remote_code=False)
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                options.checkpoint,
                dtype=options.dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **_quantization(options.checkpoint, transformers),
            )
            model = model.to(device)
    except Exception as error:  # of a damaged config or file, transformers and safetensors raise whatever comes up
        said = " ".join(str(error).split())[:_SAID_CHARACTERS]
        raise InputError(f"checkpoint {options.checkpoint}: cannot be loaded: {said}") from None
    _check_whole(options.checkpoint, report)
    _check_tokenizer(options.checkpoint, tokenizer)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Loaded(model.eval(), tokenizer, device, str(model.dtype).removeprefix("torch."), context)


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            f"a checkpoint is read with torch and transformers ({error}): pip install 'coterie[transformers]'"
        ) from None
    if int(transformers.__version__.split(".")[0]) < 5:
        raise UnsupportedError(
            f"transformers {transformers.__version__} builds MoE layers otherwise; install 5.0 or later: "
            "pip install 'coterie[transformers]'"
        )
    return torch, transformers


def _device(asked: str, torch: Any) -> str:
    if asked == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda: torch sees no GPU; pass --device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def _check_place(checkpoint: str) -> None:
    """Refuse what is neither a name on the hub nor a folder with a config and safetensors."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        if not _HUB_NAME.fullmatch(checkpoint):
            raise InputError(f"checkpoint {checkpoint}: there is no such folder, and it is no name on the hub")
        return
    if not (folder / "config.json").exists():
        raise InputError(f"checkpoint {checkpoint}: the folder holds no config.json")
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"checkpoint {checkpoint}: the folder holds no *.safetensors; pickled weights (*.bin, *.pt) are not read, "
            "since a pickle may run any code: convert them where you trust them"
        )


def _quantization(checkpoint: str, transformers: Any) -> dict[str, Any]:
    """MXFP4 experts are unpacked: the kernels for them fuse the routing, so that nobody sees the ids."""
    config = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    return {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if method == "mxfp4" else {}


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without transformers' own progress bars, which would run through ours."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _check_whole(checkpoint: str, report: dict[str, Any]) -> None:
    """Transformers fills weights that are missing with random ones, and only warns."""
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if wrong := sorted(map(str, report.get(kind) or ())):
            raise InputError(
                f"checkpoint {checkpoint}: {len(wrong)} {kind.replace('_', ' ')}, first {wrong[0]}; "
                "it is not whole, or not of the architecture that its config.json names"
            )


def _check_tokenizer(checkpoint: str, tokenizer: Any) -> None:
    """Where its files are missing, transformers makes one that knows no word."""
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(
            f"checkpoint {checkpoint}: its tokenizer knows no token; copy the tokenizer's files there, too"
        )
