"""A tokenizer of a checkpoint with its special tokens: text to token ids and back."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from nearline.controller.text.stream import Detokenizer
from nearline.protocol.errors import ContextLengthExceeded, InvalidRequest

INLINE_CHARS = 4_000
"""Texts up to this long are tokenised on the event loop (about 2 ms at worst); longer ones in a thread."""


class Vocabulary:
    """Turns text into token ids and back. `special` are the texts of its special tokens by name (bos_token, …)."""

    def __init__(self, tokenizer_json: str, special: Mapping[str, str], add_bos: bool | None) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special = special
        self._add_bos = add_bos
        self._bos_id = self._tokenizer.token_to_id(special.get("bos_token", ""))
        self._token_bytes = lru_cache(maxsize=65536)(_TokenBytes(self._tokenizer))

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
            elif not self._add_bos and has_bos and not text.startswith(self.special["bos_token"]):
                ids = ids[1:]
        return tuple(ids)

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
