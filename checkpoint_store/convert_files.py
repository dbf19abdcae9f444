"""The small files that travel with the weights, and what they say about special tokens. Pure but for reading."""

import json
from collections.abc import Mapping
from typing import Any

from nearline.checkpoint_store.source_directory import SourceDirectory, parse_json
from nearline.protocol.errors import UnsupportedCheckpoint

CONFIG_NAME, GENERATION_NAME, TOKENIZER_NAME = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SMALL_NAMES = (
    GENERATION_NAME,
    TOKENIZER_NAME,
    TOKENIZER_CONFIG_NAME,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_TEMPLATES = "additional_chat_templates"


def gather_files(directory: SourceDirectory, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Collect a model's small files; `config` becomes config.json.

    Raises UnsupportedCheckpoint without a tokenizer.json, CheckpointCorrupt for one that is torn.
    """
    files = {CONFIG_NAME: to_json(config)}
    for name in (*SMALL_NAMES, *directory.names(".jinja", _TEMPLATES)):
        content = directory.read(name)
        if content is not None:
            files[name] = content
    if TOKENIZER_NAME not in files:
        raise _no_tokenizer(directory)
    for name, content in files.items():
        if name.endswith(".json"):
            parse_json(content, str(directory.path / name))
    return files


def special_token_ids(files: Mapping[str, bytes], vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """Read which tokens end a text and which one begins it, from every file that may say so."""
    config, generation, tokenizer, tokenizer_config = (
        json.loads(files.get(name, b"{}"))
        for name in (CONFIG_NAME, GENERATION_NAME, TOKENIZER_NAME, TOKENIZER_CONFIG_NAME)
    )
    eos: list[Any] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        eos += value if isinstance(value, list) else [value]
    eos.append(_token_id(tokenizer, tokenizer_config.get("eos_token")))
    bos = [config.get("bos_token_id"), generation.get("bos_token_id")]
    bos.append(_token_id(tokenizer, tokenizer_config.get("bos_token")))
    known = [value for value in bos if _is_token(value, vocab_size)]
    return tuple(dict.fromkeys(value for value in eos if _is_token(value, vocab_size))), known[0] if known else None


def to_json(value: Mapping[str, Any]) -> bytes:
    """Write JSON as these files usually look: indented, a newline at the end."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _token_id(tokenizer: Mapping[str, Any], token: Any) -> int | None:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return None
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == content:
            return added.get("id")  # type: ignore[no-any-return]
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return vocab.get(content) if isinstance(vocab, dict) else None


def _is_token(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _no_tokenizer(directory: SourceDirectory) -> UnsupportedCheckpoint:
    cure = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes it"
    slow = [*directory.names(".model"), *directory.names("vocab.json"), *directory.names("merges.txt")]
    found = f", only {', '.join(slow)}" if slow else ""
    return UnsupportedCheckpoint(f"{directory.path}: no {TOKENIZER_NAME}{found}; {cure}")
