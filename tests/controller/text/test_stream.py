"""Incremental text is judged by the tokenizers library (decode of all ids) and by plain string search."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nearline.controller.text.stream import Detokenizer, StopMatcher, TextStream
from nearline.protocol import TokenLogprob


@cache
def byte_level() -> Tokenizer:
    """All 256 bytes plus a few merged pieces, some of which end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {byte: char for char, byte in zip(alphabet, _bytes_of(alphabet), strict=True)}
    pieces = ["DEF", "GH", "IJ", " the", "漢字"]
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    raw = [piece.encode() for piece in pieces] + ["a漢".encode()[:3], "👋".encode()[1:] + b"x"]
    for piece in raw:
        vocabulary.setdefault("".join(spelled[b] for b in piece), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def _bytes_of(alphabet: list[str]) -> list[int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return [ord(c) if ord(c) < 0x100 else rest[ord(c) - 0x100] for c in alphabet]


@cache
def byte_fallback() -> Tokenizer:
    """A sentencepiece-like vocabulary: ▁ for spaces, <0xNN> for bytes it lacks, leading space dropped."""
    words = ["▁", "▁Hello", "▁world", "a", "é", "<unk>"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(lambda i: tokenizer.decode(list(i)), context or [])
    return [*[detokenizer.push(i) for i in ids], detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=40))
def test_pieces_of_any_byte_level_ids_join_to_the_whole_decode(ids: list[int]) -> None:
    tokenizer = byte_level()
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    tokenizer = byte_level()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {byte: i for i, byte in enumerate(_bytes_of(alphabet))}
    shown = pieces(tokenizer, [ids[b] for b in text.encode()])
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aé漢👋 ďЖ", max_size=12), st.booleans())
def test_byte_fallback_characters_come_whole(text: str, has_words: bool) -> None:
    tokenizer = byte_fallback()
    ids = [257, 258, *text.encode()] if has_words else list(text.encode())
    shown = pieces(tokenizer, ids)
    assert "".join(shown) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in shown)


def test_an_unfinished_character_appears_only_at_the_very_end() -> None:
    shown = pieces(byte_fallback(), [*"漢".encode(), 0xE6])
    assert shown == ["", "", "漢", "", "\ufffd"]


def test_a_continued_prompt_keeps_its_leading_space() -> None:
    tokenizer = byte_fallback()
    assert "".join(pieces(tokenizer, [258], context=[257])) == " world"
    assert "".join(pieces(tokenizer, [258])) == "world"


def run_stops(chunks: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for chunk in chunks:
        text, is_stopped = matcher.push(chunk)
        shown += text
        if is_stopped:
            return shown, True
    return shown + matcher.flush(), False


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_are_found_as_by_plain_search_whatever_the_pieces(chunks: list[str], stops: list[str]) -> None:
    whole = "".join(chunks)
    shown, is_stopped = run_stops(chunks, stops)
    assert is_stopped == any(stop in whole for stop in stops)
    if not is_stopped:
        assert shown == whole
    else:
        assert not any(stop in shown for stop in stops)
        assert whole.startswith(shown)
        assert any(whole[len(shown) :].startswith(stop) for stop in stops)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=12),
    st.text(alphabet="ab", min_size=1, max_size=5),
)
def test_one_stop_string_cuts_exactly_at_its_first_occurrence(chunks: list[str], stop: str) -> None:
    whole = "".join(chunks)
    expected = whole.split(stop, 1)[0] if stop in whole else whole
    assert run_stops(chunks, [stop])[0] == expected


def test_only_the_ambiguous_suffix_is_held_back() -> None:
    matcher = StopMatcher(["x" * 60])
    assert matcher.push("hello ") == ("hello ", False)
    assert matcher.push("worx") == ("wor", False)
    assert matcher.push("y") == ("xy", False)


def stream(stops: list[str], hidden: frozenset[int] = frozenset(), min_tokens: int = 0) -> TextStream:
    tokenizer = byte_level()
    return TextStream(Detokenizer(lambda i: tokenizer.decode(list(i))), stops, hidden, min_tokens)


def ids_of(*texts: str) -> list[int]:
    tokenizer = byte_level()
    vocabulary = {tokenizer.decode([i]): i for i in range(tokenizer.get_vocab_size())}
    return [vocabulary[text] for text in texts]


def test_a_stop_string_over_three_tokens_leaks_nothing_and_ends_the_count() -> None:
    text = stream(["DEFGHIJ"])
    shown = [text.push([i]) for i in ids_of("a", "DEF", "GH")]
    assert [delta.text for delta in shown] == ["a", "", ""]
    last = text.push(ids_of("IJ", "b"))
    assert (last.text, last.is_stopped, text.num_tokens) == ("", True, 4)


def test_text_held_for_a_stop_string_appears_when_the_sequence_ends() -> None:
    text = stream(["DEFGHIJ"])
    shown = "".join(text.push([i]).text for i in ids_of("a", "DEF", "GH"))
    assert shown + text.finish().text == "aDEFGH"


def test_stop_strings_count_only_after_min_tokens() -> None:
    text = stream(["a"], min_tokens=3)
    assert text.push(ids_of("a", "b")).text == "ab"
    last = text.push(ids_of("c", "a"))
    assert (last.text, last.is_stopped) == ("c", True)


def test_ids_that_end_a_sequence_have_no_text() -> None:
    end = ids_of("b")[0]
    text = stream([], hidden=frozenset({end}))
    assert text.push([*ids_of("a"), end]).text == "a"
    assert text.num_tokens == 2


@pytest.mark.parametrize("stop", [None, "GH"])
def test_logprobs_keep_step_with_the_text_that_is_shown(stop: str | None) -> None:
    text = stream([stop] if stop else [])
    ids = ids_of("a", "DEF", "GH", "b")
    found: list[Any] = []
    shown = ""
    for number, token_id in enumerate(ids):
        delta = text.push([token_id], [TokenLogprob(-float(number))])
        shown += delta.text
        found += delta.tokens
        if delta.is_stopped:
            break
    else:
        last = text.finish()
        shown += last.text
        found += last.tokens
    expected = ["a", "DEF"] if stop else ["a", "DEF", "GH", "b"]
    assert shown == "".join(expected)
    assert [token.token_id for token in found] == ids[: len(expected)]
    assert [token.offset for token in found] == [0, 1, 4, 6][: len(expected)]


def test_the_vocabularies_of_this_file_are_what_they_claim() -> None:
    assert byte_level().decode([i for i, _ in enumerate(range(256))]) != ""
    assert json.loads(byte_fallback().to_str())["decoder"]["type"] == "Sequence"
