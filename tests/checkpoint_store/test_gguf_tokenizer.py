"""A GGUF vocabulary becomes a tokenizer that splits and merges as the original does."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from nearline.checkpoint_store.gguf_file import read_gguf
from nearline.checkpoint_store.gguf_tokenizer import tokenizer_files
from nearline.protocol.errors import CheckpointCorrupt, UnsupportedCheckpoint

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "l l", "he ll", "Ġ he", "1 2", "Ġ Ġ", "' s"]
BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [*LETTERS, *(m.replace(" ", "") for m in MERGES), "<|bos|>", "<|end|>", "<tool>"],
    "tokenizer.ggml.token_type": [1] * (256 + len(MERGES)) + [3, 3, 4],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 256 + len(MERGES),
    "tokenizer.ggml.eos_token_id": 257 + len(MERGES),
}


def build(metadata: dict[str, Any] | None = None, **changes: Any) -> tuple[Tokenizer, dict[str, Any]]:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    wanted = {key: value for key, value in {**(metadata or BYTE_LEVEL), **changed}.items() if value is not None}
    files = tokenizer_files(wanted, 512)
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small files made from the real vocabulary."""
    directory = tmp_path_factory.mktemp("smollm2")
    for name, content in tokenizer_files(read_gguf(smollm2_gguf).metadata, 8192).items():
        (directory / name).write_bytes(content)
    return directory


TEXTS = [
    "Hello world, it's 2026! 3.14159 and 1000000",
    "😀 漢字 ď ünïcödé ﷽ 👩‍👩‍👧",
    "  leading,   inner\n\n\t and trailing  ",
    "<|im_start|>user\nWhat is 12+34?<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return x ** 2  # x²",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_real_vocabulary_round_trips_and_splits_every_digit(smollm2: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert all(not (set(token) & set("0123456789")) or len(token) == 1 for token in encoded.tokens)


def test_the_real_vocabulary_encodes_known_texts_to_known_tokens(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\n").tokens == ["<|im_start|>", "user", "Ċ"]
    assert tokenizer.encode("Hello world 42").tokens == ["Hello", "Ġworld", "Ġ", "4", "2"]
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>").ids == [0, 1, 2]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_transformers_reads_the_files_and_renders_the_chat_template(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49_152)
    messages = [{"role": "user", "content": "Hi 5"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi 5<|im_end|>\n<|im_start|>assistant\n")
    template = jinja2.Template((smollm2 / "chat_template.jinja").read_text())
    assert template.render(messages=messages, add_generation_prompt=True) == text
    assert tokenizer("Hi 5").input_ids == Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode("Hi 5").ids


def test_the_split_rules_are_those_transformers_knows() -> None:
    def pattern(name: str) -> str:
        step = json.loads(build(pre=name)[0].to_str())["pre_tokenizer"]["pretokenizers"][0]
        return str(step["pattern"]["Regex"])

    assert pattern("qwen2") == PRETOKENIZE_REGEX
    assert pattern("llama-bpe") == TikTokenConverter(None).pattern
    assert pattern("tekken") != pattern("qwen2")


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["Ġ", "1", "2", "Ġ", "hell", "'s"]),
        ("gpt-2", ["Ġ", "12", "Ġ", "hell", "'s"]),
        ("qwen2", ["Ġ", "1", "2", "Ġ", "hell", "'s"]),
        ("llama-bpe", ["Ġ", "12", "Ġ", "hell", "'s"]),
        ("tekken", ["Ġ", "1", "2", "Ġ", "hell", "'s"]),
    ],
)
def test_each_rule_splits_digits_its_own_way(pre: str, tokens: list[str]) -> None:
    assert build(pre=pre, add_bos_token=False)[0].encode(" 12 hell's").tokens == tokens


def test_special_tokens_are_skipped_when_decoding_and_user_tokens_are_not() -> None:
    tokenizer, config = build()
    ids = tokenizer.encode("<|bos|>he<tool><|end|>").ids
    assert tokenizer.decode(ids) == "he<tool>"
    assert (config["bos_token"], config["eos_token"], config["model_max_length"]) == ("<|bos|>", "<|end|>", 512)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, ["he"]),
        ({"add_bos_token": True}, ["<|bos|>", "he"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|bos|>", "he", "<|end|>"]),
        ({"pre": "llama-bpe"}, ["<|bos|>", "he"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["he"]),
    ],
)
def test_begin_and_end_tokens_are_added_where_the_model_wants_them(changes: dict[str, Any], tokens: list[str]) -> None:
    tokenizer, config = build(**changes)
    assert tokenizer.encode("he").tokens == tokens
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]
    assert (config["add_bos_token"], config["add_eos_token"]) == ("<|bos|>" in tokens, "<|end|>" in tokens)


def test_named_chat_templates_become_files() -> None:
    extra = {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
        "tokenizer.chat_template.../x": "C",
    }
    files = tokenizer_files({**BYTE_LEVEL, **extra}, 512)
    assert files["chat_template.jinja"] == b"A"
    assert files["additional_chat_templates/tool_use.jinja"] == b"B"
    assert len(files) == 4


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"pre": "brand-new"}, UnsupportedCheckpoint, "rule 'brand-new', which is unknown here (known: gpt-2"),
        ({"pre": None}, UnsupportedCheckpoint, "rule None"),
        ({"model": "t5"}, UnsupportedCheckpoint, "tokenizer 't5' cannot be rebuilt"),
        ({"tokens": None}, UnsupportedCheckpoint, "no tokenizer.ggml.tokens"),
        ({"merges": None}, UnsupportedCheckpoint, "no tokenizer.ggml.merges"),
        ({"merges": ["zz qq"]}, CheckpointCorrupt, "contradicts itself"),
        ({"token_type": [1]}, CheckpointCorrupt, "but 1 token types"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused(changes: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error) as caught:
        build(**changes)
    assert words in caught.value.message


# ---- SentencePiece ----

PIECES = ["▁h", "he", "el", "ll", "lo", "▁he", "hell", "ello", "▁hello", "▁▁", "▁w", "or"]
SINGLES = list("▁helowrd")
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *PIECES, *SINGLES],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) + len(SINGLES)),
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES) + len(SINGLES))],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def sentence_piece(text: str) -> list[str]:
    """The algorithm itself: merge the neighbours whose union scores best, leftmost first, until none is a piece."""
    scores = dict(zip(SPM["tokenizer.ggml.tokens"][259:], SPM["tokenizer.ggml.scores"][259:], strict=True))
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    split = [[s] if s in scores else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [token for part in split for token in part]


@settings(max_examples=200)
@given(st.text(alphabet="helo wrdz漢", max_size=12))
def test_a_sentence_piece_vocabulary_merges_as_the_algorithm_says(text: str) -> None:
    tokenizer, _ = build(SPM)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tokens == sentence_piece(text)
    assert tokenizer.decode(encoded.ids) == text


def test_a_sentence_piece_model_begins_with_its_bos_by_default() -> None:
    tokenizer, config = build(SPM)
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    with pytest.raises(UnsupportedCheckpoint, match="has no scores"):
        build(SPM, scores=None)
