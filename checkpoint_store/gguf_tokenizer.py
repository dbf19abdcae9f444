"""A GGUF file's vocabulary becomes tokenizer.json and its companions, built with the `tokenizers` library.

GGUF names the way text is split (`tokenizer.ggml.pre`) but does not carry the rule: the rules of the names known here
are written down below, and an unknown name is refused, because a wrong split gives wrong tokens without any error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from nearline.checkpoint_store.convert_files import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME, to_json
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

Metadata = Mapping[str, Any]

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before BPE: by `pattern`, or by GPT-2's own rule after single digits (`splits_digits`)."""

    pattern: str | None = None
    splits_digits: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2, _DIGITS = _Split(), _Split(splits_digits=True)
_LLAMA3_SPLIT = _Split(_LLAMA3, ignores_merges=True, adds_bos=True)
_QWEN2_SPLIT = _Split(_QWEN2, is_nfc=True)
_SPLITS = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "mpt": _GPT2, "olmo": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS, "command-r": _DIGITS,
    "llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "llama-v3": _LLAMA3_SPLIT, "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT, "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _Split(_TEKKEN, ignores_merges=True, adds_bos=True),
}  # fmt: skip
_NAMES = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
_SPACE = "▁"


def tokenizer_files(metadata: Metadata, max_tokens: int) -> dict[str, bytes]:
    """Write tokenizer.json, tokenizer_config.json and the chat templates.

    Raises UnsupportedCheckpoint for a vocabulary we cannot rebuild, CheckpointCorrupt for one that contradicts itself.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    special = {ours: _special(metadata, tokens, theirs) for theirs, ours in _NAMES.items()}
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        split = _split(metadata)
        tokenizer, adds_bos_by_default = _byte_level(metadata, tokens, split), split.adds_bos
    elif model == "llama":
        tokenizer, adds_bos_by_default = _sentence_piece(metadata, tokens, special["unk_token"]), True
    else:
        raise UnsupportedCheckpoint(f"GGUF tokenizer {model!r} cannot be rebuilt; use the original model directory")
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos_by_default))
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    _add_tokens(tokenizer, metadata, tokens)
    _post_process(tokenizer, special["bos_token"] if adds_bos else None, special["eos_token"] if adds_eos else None)
    templates = _templates(metadata)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        **{name: token for name, token in special.items() if token is not None},
    }
    if "chat_template.jinja" in templates:
        config["chat_template"] = templates["chat_template.jinja"].decode()
    return {TOKENIZER_NAME: tokenizer.to_str().encode(), TOKENIZER_CONFIG_NAME: to_json(config), **templates}


def _split(metadata: Metadata) -> _Split:
    name = metadata.get("tokenizer.ggml.pre")
    split = _SPLITS.get(str(name))
    if split is None:
        raise UnsupportedCheckpoint(
            f"the GGUF tokenizer splits text by rule {name!r}, which is unknown here (known: {', '.join(_SPLITS)}); "
            "use the original model directory, which carries its tokenizer.json"
        )
    return split


def _byte_level(metadata: Metadata, tokens: list[str], split: _Split) -> Tokenizer:
    pairs = [merge.partition(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in pairs]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(BPE(vocab, merges, fuse_unk=False, ignore_merges=split.ignores_merges))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointCorrupt(f"the GGUF vocabulary contradicts itself ({error}); fetch the file again") from None
    if split.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    if split.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Metadata, tokens: list[str], unknown: str | None) -> Tokenizer:
    """Rebuild a SentencePiece BPE: GGUF keeps a score per token, and the better token of two merges first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise UnsupportedCheckpoint("the GGUF vocabulary has no scores; use the original model directory")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    normal = {token for token, kind in zip(tokens, kinds, strict=False) if kind == _NORMAL}
    found = []
    for token in normal:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                found.append((-scores[vocab[token]], vocab[left], vocab[right], (left, right)))
    merges = [pair for *_, pair in sorted(found)]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if adds_space else undo)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    if kinds and len(kinds) != len(tokens):
        raise CheckpointCorrupt(f"the GGUF file has {len(tokens)} tokens, but {len(kinds)} token types")
    wanted = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    added = [AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in wanted]
    tokenizer.add_tokens(added)


def _post_process(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put the begin and end tokens around an encoded text, where the model wants them."""
    around = [token for token in (bos, eos) if token is not None]
    if not around:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    pair = [*single, *([f"{bos}:1"] if bos else []), "$B:1", *([f"{eos}:1"] if eos else [])]
    ids = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(single), pair=" ".join(pair), special_tokens=ids
    )


def _templates(metadata: Metadata) -> dict[str, bytes]:
    templates = {}
    main = metadata.get("tokenizer.chat_template")
    if isinstance(main, str):
        templates["chat_template.jinja"] = main.encode()
    for key, value in metadata.items():
        match = re.fullmatch(r"tokenizer\.chat_template\.([\w-]+)", key)
        if match and isinstance(value, str):
            templates[f"additional_chat_templates/{match[1]}.jinja"] = value.encode()
    return templates


def _strings(metadata: Metadata, key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UnsupportedCheckpoint(f"the GGUF file has no {key}; use the original model directory")
    return value


def _special(metadata: Metadata, tokens: list[str], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None
