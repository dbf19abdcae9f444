"""Whether an adapter was trained on tokens that its base does not know. Pure but for reading."""

from typing import Any

from nearline.checkpoint_store.convert_files import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from nearline.checkpoint_store.source_directory import SourceDirectory
from nearline.protocol.errors import UnsupportedCheckpoint

_ADDED_NAME = "added_tokens.json"
_MAX_NAMED, _MAX_DIGITS = 5, 18


def check_tokens(adapter: SourceDirectory, base: SourceDirectory) -> None:
    """Refuse an adapter whose own tokenizer adds tokens that the base's lacks, or has under another id.

    They may fit within the rows of a padded embedding, so no shape shows them; prompts are split by the base's
    tokenizer, which would take them apart into letters. The pad token may differ: no prompt holds it.
    Raises UnsupportedCheckpoint naming the tokens.
    """
    settings = adapter.json(TOKENIZER_CONFIG_NAME) or {}
    added = _added(adapter, settings)
    added.pop(_content(settings.get("pad_token")), None)
    if not added:
        return
    tokenizer = base.json(TOKENIZER_NAME) or {}
    known = _vocabulary(tokenizer) | _listed(tokenizer)
    strange = [token for token, token_id in added.items() if known.get(token) != token_id]
    if strange and known:
        names = ", ".join(f"{token!r} (id {added[token]})" for token in strange[:_MAX_NAMED])
        more = f" and {len(strange) - _MAX_NAMED} more" if len(strange) > _MAX_NAMED else ""
        raise UnsupportedCheckpoint(
            f"{adapter.path}: its tokenizer adds {names}{more}, which the base's tokenizer does not have so; an "
            "adapter with tokens of its own is not served; merge it and add the result, with that tokenizer, as a model"
        )


def _added(adapter: SourceDirectory, settings: dict[str, Any]) -> dict[str, int]:
    found = _listed(adapter.json(TOKENIZER_NAME) or {})
    found |= {token: i for token, i in (adapter.json(_ADDED_NAME) or {}).items() if isinstance(i, int)}
    decoder = settings.get("added_tokens_decoder")
    for token_id, one in decoder.items() if isinstance(decoder, dict) else ():
        if (token := _content(one)) and token_id.isdecimal() and len(token_id) <= _MAX_DIGITS:
            found[token] = int(token_id)
    return found


def _listed(tokenizer: dict[str, Any]) -> dict[str, int]:
    listed = tokenizer.get("added_tokens")
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return {token: one["id"] for one in entries if (token := _content(one)) and isinstance(one.get("id"), int)}


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return vocabulary
    pairs = vocabulary if isinstance(vocabulary, list) else []
    return {pair[0]: i for i, pair in enumerate(pairs) if isinstance(pair, list) and pair and isinstance(pair[0], str)}


def _content(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
