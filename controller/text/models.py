"""Text of models: tokenizers, chat templates and sampling defaults, fetched once per checkpoint and kept on disk."""

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog

from nearline.controller.text.kept import Kept
from nearline.controller.text.templates import ChatTemplates, Message
from nearline.controller.text.vocabulary import Vocabulary
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest, Seconds
from nearline.protocol.errors import NoChatTemplate, UnsupportedCheckpoint

FetchFile = Callable[[Digest, str], Awaitable[bytes]]
Files = Mapping[str, bytes]
V = TypeVar("V")

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
ADDITIONAL_TEMPLATES = "additional_chat_templates/"
MAX_LOADED = 32
MAX_ADAPTED = 256
UNREADABLE_S: Seconds = 60.0
"""Files that cannot be read though they were fetched anew are not fetched again for this long."""

log = structlog.get_logger(__name__)


class TextModel:
    """What a model's text is made with: its vocabulary, its chat templates (or an adapter's), its sampling defaults."""

    def __init__(self, vocabulary: Vocabulary, templates: ChatTemplates, defaults: Mapping[str, Any]) -> None:
        self.vocabulary = vocabulary
        self._templates = templates
        self.defaults = defaults

    @classmethod
    def of(cls, files: Files) -> Self:
        """Build it from a checkpoint's small files. Raises UnsupportedCheckpoint."""
        if "tokenizer.json" not in files:
            raise UnsupportedCheckpoint(
                "the model has no tokenizer.json; save a fast tokenizer beside its weights and import again"
            )
        config = _json(files, "tokenizer_config.json")
        special = {**special_tokens(_json(files, "special_tokens_map.json")), **special_tokens(config)}
        vocabulary = Vocabulary(files["tokenizer.json"].decode(), special, config.get("add_bos_token"))
        templates = ChatTemplates(named_templates(files), special)
        return cls(vocabulary, templates, _json(files, "generation_config.json"))

    def with_templates(self, templates: ChatTemplates) -> "TextModel":
        """The same with the chat templates of an adapter that brings its own."""
        return TextModel(self.vocabulary, templates, self.defaults)

    @property
    def has_chat_template(self) -> bool:
        """Whether it can be sent messages; else it only continues text."""
        return self._templates.has_default

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any] | None,
        max_chars: int | None = None,
    ) -> tuple[int, ...]:
        """Turn a conversation into the token ids of its prompt.

        Raises NoChatTemplate when no template fits, ContextLengthExceeded as `Vocabulary.encode` does.
        """
        template = await self._templates.get(bool(tools))
        if template is None:
            raise NoChatTemplate(
                "this model has no chat template: call /v1/completions or send `prompt`, or add a"
                " chat_template.jinja beside the weights and import again",
                param="messages",
            )
        prompt = await template.render(messages, tools, options)
        return await self.vocabulary.encode(prompt, add_special=False, max_chars=max_chars, param="messages")


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


def own_templates(files: Files, special: Mapping[str, str]) -> ChatTemplates | None:
    """The chat templates of an adapter for a model with these special tokens; None if it brings none."""
    named = named_templates(files)
    return ChatTemplates(named, special) if named else None


def _json(files: Files, name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{name} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


class TextModels:
    """All text models in use. Owns: the cached files under `directory`, at most MAX_LOADED tokenizers in memory, and
    the compiled templates of at most MAX_ADAPTED adapters that bring their own."""

    def __init__(self, directory: Path, fetch_file: FetchFile) -> None:
        self._directory = directory
        self._fetch_file = fetch_file
        self._loaded: Kept[Digest, TextModel] = Kept(MAX_LOADED)
        self._adapted: Kept[tuple[Digest, Digest], ChatTemplates | None] = Kept(MAX_ADAPTED)
        self._unreadable: dict[Digest, Exception] = {}
        self._unneeded: list[Digest] = []

    async def get(self, checkpoint: CheckpointInfo, adapter: CheckpointInfo | None = None) -> TextModel:
        """Give the text model of a checkpoint, with an adapter's own chat template where it has one."""
        text = await self._loaded.get(checkpoint.digest, partial(self._built, checkpoint, TextModel.of))
        if adapter is None or not any("chat_template" in n or n == "tokenizer_config.json" for n in adapter.files):
            return text
        special = text.vocabulary.special
        key = (checkpoint.digest, adapter.digest)
        build = partial(own_templates, special=special)
        own = await self._adapted.get(key, partial(self._built, adapter, build))
        return text if own is None else text.with_templates(own)

    async def preload(self, checkpoint: CheckpointInfo) -> None:
        """Fetch the small files of a checkpoint while a node is there to give them, and check that they can be read."""
        if checkpoint.kind is CheckpointKind.MODEL:
            await self.get(checkpoint)
        else:
            await self._built(checkpoint, named_templates)

    async def sweep(self, needed: Container[Digest]) -> None:
        """Forget the checkpoints that nothing needs and nothing needed at the sweep before, those of earlier runs too.

        A text is loaded before its name is registered; one that is swept all the same is fetched again.
        """
        found = await asyncio.to_thread(_names, self._directory)
        before, self._unneeded = self._unneeded, [digest for digest in found if digest not in needed]
        for digest in before:
            if digest not in needed:
                self._loaded.forget(digest.__eq__)
                self._adapted.forget(lambda key: digest in key)  # noqa: B023 (called at once)
                await asyncio.to_thread(shutil.rmtree, self._directory / digest, ignore_errors=True)

    async def _built(self, checkpoint: CheckpointInfo, build: Callable[[Files], V]) -> V:
        digest = checkpoint.digest
        if digest in self._unreadable:
            raise self._unreadable[digest].with_traceback(None)
        files = await self._files(checkpoint)
        try:
            return await asyncio.to_thread(build, files)
        except Exception:  # a crash may have torn what was kept: it is fetched again
            await asyncio.to_thread(shutil.rmtree, self._directory / digest, ignore_errors=True)
        files = await self._files(checkpoint)
        try:
            return await asyncio.to_thread(build, files)
        except Exception as error:
            self._unreadable[digest] = error
            asyncio.get_running_loop().call_later(UNREADABLE_S, self._unreadable.pop, digest, None)
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
