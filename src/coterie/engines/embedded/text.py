"""Text to tokens and back: the checkpoint's own tokenizer and chat template.

Output is put together from the bytes of its tokens, so text appears character by character, whatever tokens it is cut
into.  Two kinds of tokenizer can say which bytes a token is: byte-level BPE (Qwen, OLMoE, DeepSeek), and SentencePiece
with byte fallback (Mixtral).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import InputError, RequestError, UnsupportedError

if TYPE_CHECKING:
    import tokenizers

MAX_TEMPLATE_BYTES = 1 << 20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_LONGEST_START = 3  # bytes of a character that lacks its end, in UTF-8
_SPACE = "\u2581"  # how SentencePiece writes a space


class Detokenizer:
    """Text of one output, as its tokens come.

    A prompt may end within a character, as that of an output that goes on does; its end is shown all the same.

    Args:
        pieces: bytes of each token.
        before: tokens that the output follows.
    """

    def __init__(self, pieces: Sequence[bytes], before: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._decode(self._end_of(before))

    def _end_of(self, tokens: Sequence[int]) -> bytes:
        """Enough of their bytes to hold the beginning of a character."""
        end = b""
        for token in reversed(tokens):
            if len(end) >= _LONGEST_START:
                break
            end = (self._pieces[token] if token < len(self._pieces) else b"") + end
        return end

    def add(self, token_id: int) -> str:
        """The whole characters that this token completes.  Bytes that no character has become U+FFFD.

        The beginning of a character is kept until the rest comes; at the end of the output it is left out.
        """
        return self._decode(self._pieces[token_id] if token_id < len(self._pieces) else b"")


class ChatTemplate:
    """A chat template and the special tokens that it may name.

    Args:
        source: of the template.
        tokens: text of the special tokens, by the names that templates use, such as `eos_token`.

    Raises:
        InputError: it is not a template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        import jinja2

        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"chat template: line {error.lineno}: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any], *, prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            messages: role and content of each; contents may be lists of text parts.
            extra: further variables, such as `tools`.
            prompt: whether the assistant's turn is opened at the end.

        Raises:
            RequestError: the template refuses the messages, or a content is not text.
        """
        import jinja2

        flat = [_flatten(message, number) for number, message in enumerate(messages)]
        variables = {**self._tokens, **extra, "messages": flat, "add_generation_prompt": prompt}
        try:
            text: str = self._template.render(variables)
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError) as error:
            raise RequestError(f"messages: the model's chat template refuses them: {error}", "messages") from None
        return text


def _environment() -> Any:
    """The sandbox that templates are written for (https://huggingface.co/docs/transformers/chat_templating)."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    return environment


def _flatten(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message whose content is one string, as templates expect; text parts are put together line by line."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages: message {number} has a part that is not text; only text is served", "messages"
            )
    return {**message, "content": "\n".join(part["text"] for part in content)}


class Tokenizer:
    """Tokenizer, end tokens and chat template of a checkpoint.

    Args:
        backend: the tokenizer.
        end_ids: tokens that end an output.
        template: for conversations; None if the checkpoint has none.

    Raises:
        UnsupportedError: it is of a kind whose tokens have no bytes of their own.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, end_ids: Iterable[int], template: ChatTemplate | None = None
    ) -> None:
        self._backend = backend
        self._template = template
        self._pieces = _token_bytes(backend)
        self.end_ids = frozenset(end_ids)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a checkpoint's files: `tokenizer.json`, and the others where they are there.

        Raises:
            InputError: `tokenizer.json` is missing, or a file is damaged.
            UnsupportedError: the package `tokenizers` or `jinja2` is missing, or the kind of tokenizer is unknown.
        """
        try:
            import jinja2  # noqa: F401
            import tokenizers
        except ImportError as error:
            raise UnsupportedError(f"{error}; run: pip install 'coterie[embedded]'") from None
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{path}: not found; a checkpoint to serve needs its tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise InputError(f"{path}: not a tokenizer: {error}") from None
        config = _read_json(folder / "tokenizer_config.json")
        return cls(backend, _end_ids(folder, config, backend), _template(folder, config))

    @property
    def vocab(self) -> int:
        """Tokens that it knows."""
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with those that the tokenizer puts around it."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] | None = None, *, prompt: bool = True
    ) -> list[int]:
        """Tokens of a conversation, by the model's template; see `ChatTemplate.render`.

        Raises:
            RequestError: the checkpoint has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("messages: the model has no chat template; use /v1/completions", "messages")
        text = self._template.render(messages, extra or {}, prompt=prompt)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        """For one output, which follows these tokens; special tokens have no text."""
        return Detokenizer(self._pieces, before)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of a whole output."""
        detokenizer = self.detokenizer()
        return "".join([detokenizer.add(token) for token in token_ids])


# --- what a checkpoint says -------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: not a JSON object")
    return found


def _end_ids(folder: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> set[int]:
    """End tokens by generation_config.json, else config.json, and the tokenizer's own, as in vLLM."""
    paths = [folder / "generation_config.json", folder / "config.json"]
    named = ((path, _read_json(path).get("eos_token_id")) for path in paths)
    path, found = next(((path, value) for path, value in named if value is not None), (folder, []))
    ids = found if isinstance(found, list) else [found]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise InputError(f"{path}: eos_token_id is {found!r}, neither a token nor a list of tokens")
    own = backend.token_to_id(_token_text(config.get("eos_token")))
    return set(ids) | ({own} if own is not None else set())


def _template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    source = config.get("chat_template")
    if path.is_file():
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise InputError(f"{path}: {path.stat().st_size} bytes, more than the {MAX_TEMPLATE_BYTES} allowed")
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8: {error}") from None
    if isinstance(source, list):  # several, by name
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}.get(
            "default"
        )
    if not isinstance(source, str):
        return None
    names = [name for name in config if name.endswith("_token")]
    return ChatTemplate(source, {name: _token_text(config[name]) for name in names})


def _token_text(token: object) -> str:
    """Text of a special token, written as a string or as an object; empty for none."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


# --- bytes of tokens --------------------------------------------------------------------------------


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Bytes of each token by its id; none for special tokens and for ids without a token."""
    to_bytes = _decoder(json.loads(backend.to_str()).get("decoder") or {})
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, token in vocabulary.items():
        if token not in added:
            pieces[token] = to_bytes(text)
        elif not added[token].special:
            pieces[token] = text.encode()
    return pieces


def _decoder(spec: Mapping[str, Any]) -> Callable[[str], bytes]:
    parts = [spec, *spec.get("decoders", ())]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level
    if "ByteFallback" in kinds and {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "} in parts:
        return _sentence_piece
    raise UnsupportedError(
        f"tokenizer: a decoder of {', '.join(sorted(map(str, kinds)))}; only byte-level BPE and SentencePiece with "
        "byte fallback say which bytes a token is"
    )


def _byte_level(text: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in text])
    except KeyError:
        return text.encode()


def _sentence_piece(text: str) -> bytes:
    found = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(found[1], 16)]) if found else text.replace(_SPACE, " ").encode()


def _byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE: printable Latin-1 for itself, others from U+0100 on.

    GPT-2's `bytes_to_unicode`, https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
