"""Text of models: tokenizers, chat templates and sampling defaults, fetched once per checkpoint and kept on disk."""

import asyncio
import json
import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog
from tokenizers import Tokenizer

from nearline.controller.templates import ChatTemplate, Message, choose_template
from nearline.controller.text_stream import Detokenizer
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest
from nearline.protocol.errors import ContextLengthExceeded, InvalidRequest, UnsupportedCheckpoint

FetchFile = Callable[[Digest, str], Awaitable[bytes]]
Files = Mapping[str, bytes]

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
ADDITIONAL_TEMPLATES = "additional_chat_templates/"
INLINE_CHARS = 4_000
"""Texts up to this long are tokenised on the event loop (about 2 ms at worst); longer ones in a thread."""

MAX_LOADED = 32

log = structlog.get_logger(__name__)


class TextModel:
    """Tokenizer, chat templates and sampling defaults of one checkpoint, built from its small files."""

    def __init__(self, files: Files) -> None:
        if "tokenizer.json" not in files:
            raise UnsupportedCheckpoint(
                "the model has no tokenizer.json; save a fast tokenizer beside its weights and import again"
            )
        config = _json(files, "tokenizer_config.json")
        self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {**special_tokens(_json(files, "special_tokens_map.json")), **special_tokens(config)}
        self._add_bos = config.get("add_bos_token")
        self._bos_id = self._tokenizer.token_to_id(self._special.get("bos_token", ""))
        self._token_bytes = lru_cache(maxsize=65536)(_TokenBytes(self._tokenizer))
        self._templates = named_templates(files)
        self._compiled: dict[str, ChatTemplate] = {}
        self.defaults = _json(files, "generation_config.json")

    def with_templates(self, files: Files) -> "TextModel":
        """This model's tokenizer with the chat templates of an adapter that brings its own."""
        templates = named_templates(files)
        if not templates:
            return self
        other = object.__new__(TextModel)
        other.__dict__ = {**self.__dict__, "_templates": templates, "_compiled": {}}
        return other

    async def encode(
        self, text: str, add_special: bool = True, max_chars: int | None = None, param: str = "prompt"
    ) -> tuple[int, ...]:
        """Turn text into token ids, with the model's beginning-of-text token in front when `add_special`.

        Raises ContextLengthExceeded, naming `param`, for a text so long that tokenising it would be in vain.
        """
        check_chars(len(text), max_chars, param)
        if len(text) <= INLINE_CHARS:
            return self._encode(text, add_special)
        return await asyncio.to_thread(self._encode, text, add_special)

    def _encode(self, text: str, add_special: bool) -> tuple[int, ...]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        except TypeError:
            raise InvalidRequest("the text is not valid Unicode (lone surrogates cannot be tokenised)") from None
        if add_special and self._bos_id is not None and self._add_bos is not None:
            has_bos = ids[:1] == [self._bos_id]
            if self._add_bos and not has_bos:
                ids = [self._bos_id, *ids]
            elif not self._add_bos and has_bos and not text.startswith(self._special["bos_token"]):
                ids = ids[1:]
        return tuple(ids)

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
        max_chars: int | None = None,
    ) -> tuple[int, ...]:
        """Turn a conversation into the token ids of its prompt.

        Raises InvalidRequest when no template fits, ContextLengthExceeded as `encode` does.
        """
        prompt = await self._template(bool(tools)).render(messages, tools, options)
        return await self.encode(prompt, add_special=False, max_chars=max_chars, param="messages")

    def _template(self, has_tools: bool) -> ChatTemplate:
        source = choose_template(self._templates, has_tools)
        if source is None:
            raise InvalidRequest(
                "this model has no chat template: call /v1/completions or send `prompt`, or add a"
                " chat_template.jinja beside the weights and import again",
                param="messages",
            )
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, self._special)
        return self._compiled[source]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def detokenizer(self, context_ids: Sequence[int] = ()) -> Detokenizer:
        """Make an incremental decoder for one sequence that continues `context_ids`."""
        return Detokenizer(self.decode, context_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes a token stands for; some are part of a character."""
        return self._token_bytes(token_id)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_id


class _TokenBytes:
    """Bytes of single tokens, for the three ways vocabularies spell bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in [decoder, *decoder.get("decoders", [])]}
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else {}
        self._added = set(tokenizer.get_added_tokens_decoder())

    def __call__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if self._alphabet and all(char in self._alphabet for char in token):
            return bytes(self._alphabet[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def check_chars(num_chars: int, max_chars: int | None, param: str) -> None:
    """Refuse a text that is too long whatever its tokens are. Raises ContextLengthExceeded."""
    if max_chars is not None and num_chars > max_chars:
        raise ContextLengthExceeded(
            f"the text has {num_chars} characters, more than the {max_chars} this model's context could ever hold;"
            " shorten it",
            param=param,
        )


def _byte_alphabet() -> dict[str, int]:
    """Map the printable characters of byte-level BPE vocabularies to bytes.

    Source: GPT-2's vocabulary: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Read bos_token, eos_token … from a tokenizer_config.json or special_tokens_map.json."""
    found = {}
    for key, value in config.items():
        if not key.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found


def named_templates(files: Files) -> dict[str, str]:
    """Collect a checkpoint's chat templates by name; a chat_template.jinja wins over tokenizer_config.json."""
    value = _json(files, "tokenizer_config.json").get("chat_template")
    named: dict[str, str] = {}
    if isinstance(value, str):
        named["default"] = value
    elif isinstance(value, list):
        named.update({str(entry["name"]): str(entry["template"]) for entry in value})
    elif isinstance(value, dict):
        named.update({str(name): str(template) for name, template in value.items()})
    for name, data in files.items():
        if name.startswith(ADDITIONAL_TEMPLATES) and name.endswith(".jinja"):
            named[name.removeprefix(ADDITIONAL_TEMPLATES).removesuffix(".jinja")] = data.decode()
    if "chat_template.jinja" in files:
        named["default"] = files["chat_template.jinja"].decode()
    return named


def _json(files: Files, name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{name} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


class TextModels:
    """All text models in use. Owns: the cached files under `directory` and at most MAX_LOADED tokenizers in memory."""

    def __init__(self, directory: Path, fetch_file: FetchFile) -> None:
        self._directory = directory
        self._fetch_file = fetch_file
        self._loaded: OrderedDict[Digest, asyncio.Task[TextModel]] = OrderedDict()
        self._unneeded: list[Digest] = []

    async def get(self, checkpoint: CheckpointInfo, adapter: CheckpointInfo | None = None) -> TextModel:
        """Give the text model of a checkpoint, with an adapter's own chat template where it has one."""
        text = await self._get(checkpoint)
        if adapter is None or not any("chat_template" in n or n == "tokenizer_config.json" for n in adapter.files):
            return text
        return text.with_templates(await self._files(adapter))

    async def preload(self, checkpoint: CheckpointInfo) -> None:
        """Fetch the small files of a checkpoint while a node is there to give them, and check that they can be read."""
        if checkpoint.kind is CheckpointKind.MODEL:
            await self._get(checkpoint)
        else:
            named_templates(await self._files(checkpoint))

    async def sweep(self, needed: Container[Digest]) -> None:
        """Forget the checkpoints that nothing needs and nothing needed at the sweep before, those of earlier runs too.

        A text is loaded before its name is registered; one that is swept all the same is fetched again.
        """
        found = await asyncio.to_thread(_names, self._directory)
        before, self._unneeded = self._unneeded, [digest for digest in found if digest not in needed]
        for digest in before:
            if digest not in needed:
                self._loaded.pop(digest, None)
                await asyncio.to_thread(shutil.rmtree, self._directory / digest, ignore_errors=True)

    async def _get(self, checkpoint: CheckpointInfo) -> TextModel:
        task = self._loaded.get(checkpoint.digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._load(checkpoint), name=f"text {checkpoint.digest}")
            self._loaded[checkpoint.digest] = task
        self._loaded.move_to_end(checkpoint.digest)
        while len(self._loaded) > MAX_LOADED:
            self._loaded.popitem(last=False)
        return await asyncio.shield(task)

    async def _load(self, checkpoint: CheckpointInfo) -> TextModel:
        files = await self._files(checkpoint)
        try:
            return await asyncio.to_thread(TextModel, files)
        except Exception:  # a crash may have torn what was kept: the next call fetches it
            await asyncio.to_thread(shutil.rmtree, self._directory / checkpoint.digest, ignore_errors=True)
            raise

    async def _files(self, checkpoint: CheckpointInfo) -> Files:
        wanted = [n for n in checkpoint.files if n in TEXT_FILES or n.startswith(ADDITIONAL_TEMPLATES)]
        return {name: await self._file(checkpoint.digest, name) for name in wanted}

    async def _file(self, digest: Digest, name: str) -> bytes:
        path = self._directory / digest / name.replace("/", "__")
        if path.exists():
            return await asyncio.to_thread(path.read_bytes)
        data = await self._fetch_file(digest, name)
        try:
            await asyncio.to_thread(_publish, path, data)
        except OSError as error:  # a full disk must not stop serving: the file stays in memory
            log.warning("text_cache_write_failed", path=str(path), error=str(error))
        return data


def _publish(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        incoming.write_bytes(data)
        os.replace(incoming, path)
    except OSError:
        incoming.unlink(missing_ok=True)  # on a full disk, what was written of it
        raise


def _names(directory: Path) -> list[Digest]:
    return sorted(Digest(path.name) for path in directory.iterdir()) if directory.is_dir() else []
