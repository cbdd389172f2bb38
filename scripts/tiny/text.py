"""The tokenizer, token streams to train on, and held-out prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny.corpus import Document, Split
from tiny.prompts import choose_prompts
from tiny.settings import END, VOCABULARY, Stream

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOKENIZER_BYTES = 1_000_000  # of each domain, so that none owns the vocabulary


def train_tokenizer(domains: Mapping[str, Split]) -> PreTrainedTokenizerFast:
    """Byte-level BPE on an equal share of each domain's training documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_shares(domains), trainer)
    end = SPECIAL[END]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, bos_token=end)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _shares(domains: Mapping[str, Split]) -> Iterator[str]:
    for division in domains.values():
        taken = 0
        for document in division.train:
            if taken >= _TOKENIZER_BYTES:
                break
            taken += len(document.text.encode())
            yield document.text


def stream(tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document]) -> Stream:
    """Token ids of all documents, each followed by `END`."""
    encoded = tokenizer.backend_tokenizer.encode_batch([document.text for document in documents])
    return np.concatenate([np.array([*encoding.ids, END], dtype=np.uint16) for encoding in encoded])


@dataclass(frozen=True, slots=True)
class Data:
    """All that training and measuring read, by domain.

    Attributes:
        train: token streams of the training documents.
        held: token streams of the held-out documents.
        prompts: texts from held-out documents, each of the same number of tokens.
    """

    train: dict[str, Stream]
    held: dict[str, Stream]
    prompts: dict[str, list[str]]


def prepare(tokenizer: PreTrainedTokenizerFast, domains: Mapping[str, Split], prompts: int, length: int) -> Data:
    """Encode every domain and choose its prompts.

    Raises:
        ValueError: the held-out documents of a domain hold fewer prompts than asked for.
    """

    def encode(text: str) -> Sequence[int]:
        return tokenizer.backend_tokenizer.encode(text).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.backend_tokenizer.decode(list(ids))

    return Data(
        train={name: stream(tokenizer, division.train) for name, division in domains.items()},
        held={name: stream(tokenizer, division.held) for name, division in domains.items()},
        prompts={
            name: choose_prompts(name, division.held, encode, decode, prompts, length)
            for name, division in domains.items()
        },
    )
