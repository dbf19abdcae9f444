"""Structured output: what a grammar allows is all that comes out, however a sequence is run; nobody else sees it."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearline.engine import grammars as module
from nearline.engine.grammars import Grammars
from nearline.protocol import Grammar, GrammarKind, SamplingParams
from nearline.protocol.errors import Fault, InvalidRequest, UnsupportedCheckpoint

EOS = 258
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
JSON = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
REGEX = Grammar(GrammarKind.REGEX, "[a-c]{3,6}-[0-9]{2}")
CHOICE = Grammar(GrammarKind.LARK, 'start: "yes" | "no" | "née"')
BAD = (
    Grammar(GrammarKind.REGEX, "("),
    Grammar(GrammarKind.LARK, "start: nobody"),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": 1}'),
)


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_json: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(tiny_tokenizer_json))
    return path


@pytest.fixture
def harness(tiny_model: Callable[..., Any], bind: Callable[..., Any], tokenizer: Path) -> Any:
    model = tiny_model("Llama", vocab_size=272)
    return bind(model, tokenizer=tokenizer, eos_token_ids=(EOS,))


def sampling(grammar: Grammar | None, seed: int = 0, **other: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.3, "seed": seed, "max_tokens": 200, "grammar": grammar} | other))


def finish(harness: Any, sequence: Any, limit: int = 200) -> list[int]:
    """Run until the grammar is complete; the last token is part of what is returned."""
    for _ in range(limit):
        (outcome,) = harness.step([sequence])
        assert outcome.error is None, outcome.error
        if outcome.is_last:
            break
    harness.release(sequence)
    return list(sequence.token_ids[sequence.num_prompt :])


def text(ids: list[int], tokenizer: Path) -> str:
    from tokenizers import Tokenizer

    decoded: str = Tokenizer.from_file(str(tokenizer)).decode(ids)
    return decoded


def test_answers_are_what_the_grammar_says_whatever_the_model_wants(harness: Any, prompt: Any, tokenizer: Path) -> None:
    said = set()
    for seed in range(6):
        ids = finish(harness, harness.sequence(prompt(9), sampling(JSON, seed)))
        value = json.loads(text(ids, tokenizer))
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 8
        assert value["age"] >= 0
        code = text(finish(harness, harness.sequence(prompt(9), sampling(REGEX, seed))), tokenizer)
        assert re.fullmatch("[a-c]{3,6}-[0-9]{2}", code)
        said.add(text(finish(harness, harness.sequence(prompt(9), sampling(CHOICE, seed, ignore_eos=True))), tokenizer))
    assert said <= {"yes", "no", "née"}
    assert len(said) > 1


def test_a_resumed_sequence_goes_on_token_for_token_wherever_it_was_cut(harness: Any, prompt: Any) -> None:
    tokens, params = prompt(7), sampling(JSON, seed=4)
    whole = finish(harness, harness.sequence(tokens, params))
    for cut in range(0, len(whole), 9):
        resumed = harness.sequence([*tokens, *whole[:cut]], params, num_prompt=7)
        assert finish(harness, resumed) == whole
    preempted = harness.sequence(tokens, params)
    for _ in range(3):
        harness.step([preempted])
    harness.release(preempted)
    assert finish(harness, preempted) == whole


def test_the_rest_of_a_batch_is_as_it_is_without_grammars(harness: Any, prompt: Any) -> None:
    free = [sampling(None, temperature=0.0), sampling(None, seed=5), sampling(None, temperature=0.0, logprobs=2)]
    alone = [harness.generate([harness.sequence(prompt(8), s)], 8)[0] for s in free]
    bounded = sampling(Grammar(GrammarKind.REGEX, "[xyz]{40}"), seed=1)
    together = [harness.sequence(prompt(8), s) for s in (free[0], bounded, free[1], free[2])]
    outputs = harness.generate(together, 8)
    assert [outputs[0], outputs[2], outputs[3]] == alone
    assert harness.generate([harness.sequence(prompt(8), s) for s in free], 8) == alone


@pytest.mark.parametrize("order", [(REGEX, *BAD, JSON), (*BAD, CHOICE), (BAD[0], REGEX, BAD[0])])
def test_a_bad_grammar_fails_its_request_alone_before_and_after_good_ones(
    harness: Any, prompt: Any, order: tuple[Grammar, ...]
) -> None:
    plain = harness.generate([harness.sequence(prompt(6))], 3)[0]
    for grammar in order:
        bounded, other = harness.sequence(prompt(6), sampling(grammar)), harness.sequence(prompt(6))
        first, second = harness.step([bounded, other])
        assert (first.error is not None) == (grammar in BAD)
        if first.error is not None:
            assert (first.error.code, first.error.param) == ("invalid_request", "grammar")
        assert second.token_id == plain[0]


def test_min_tokens_cannot_hold_a_complete_grammar_open(harness: Any, prompt: Any, tokenizer: Path) -> None:
    sequence = harness.sequence(prompt(5), sampling(CHOICE, min_tokens=50))
    assert text(finish(harness, sequence), tokenizer) in ("yes", "no", "née")


def test_logprobs_are_the_models_own_not_those_of_the_mask(harness: Any, prompt: Any) -> None:
    exact = harness.logits(prompt(9))[-1].double().log_softmax(-1)
    (outcome,) = harness.step([harness.sequence(prompt(9), sampling(CHOICE, logprobs=1))])
    assert outcome.logprob.logprob == pytest.approx(float(exact[outcome.token_id]), abs=1e-5)


def test_a_step_that_is_run_again_counts_its_token_once(harness: Any, prompt: Any) -> None:
    good = harness.sequence(prompt(6), sampling(REGEX, seed=2))
    expected = finish(harness, harness.sequence(prompt(6), sampling(REGEX, seed=2)))
    harness.step([good, harness.sequence([3, 100_000, 4])])  # the step fails and every item runs alone
    assert finish(harness, good) == expected


def test_what_is_missing_is_named(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="the checkpoint's tokenizer"):
        Grammars(tmp_path / "tokenizer.json", 272, (EOS,)).compile(REGEX)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UnsupportedCheckpoint, match="cannot be used for structured output"):
        Grammars(tmp_path / "broken.json", 272, (EOS,)).compile(REGEX)
    monkeypatch.setattr(module, "llguidance", None)
    with pytest.raises(Fault, match="pip install llguidance"):
        Grammars(tokenizer, 272, (EOS,)).compile(REGEX)


def test_a_grammar_too_large_to_follow_is_refused_in_bounded_time(tokenizer: Path) -> None:
    deep: Any = {"type": "string"}
    for _ in range(13):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}}
    with pytest.raises(InvalidRequest, match="too big"):
        Grammars(tokenizer, 272, (EOS,)).compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(deep)))


def test_an_expression_too_large_is_refused_in_a_batch_and_kept_by_nobody(harness: Any, prompt: Any) -> None:
    grammars = harness.runner.grammars
    for count in (1000, 1001):
        large = Grammar(GrammarKind.REGEX, f"((a{{{count}}}){{1000}}){{1000}}b")
        plain, bounded = harness.sequence(prompt(6)), harness.sequence(prompt(6), sampling(large))
        outcomes = harness.step([plain, bounded])
        if outcomes[1].error is None:
            outcomes = harness.step([plain, bounded])
        assert outcomes[0].error is None
        assert "too many expressions" in outcomes[1].error.message
        assert not grammars.has(large)


def test_the_first_mask_is_made_where_a_grammar_is_compiled(tokenizer: Path) -> None:
    """A grammar whose first mask fails is refused there, and no step ever meets it."""
    grammars, empty = Grammars(tokenizer, 272, (EOS,)), Grammar(GrammarKind.LARK, "start: A\nA: /a/ & /b/")
    with pytest.raises(InvalidRequest, match="after 0 tokens"):
        grammars.compile(empty)
    assert not grammars.has(empty)


def test_a_tokenizer_of_another_size_than_the_models_vocabulary_serves(tokenizer: Path, harness: Any) -> None:
    for vocab_size in (300, 259, 257):
        grammars = Grammars(tokenizer, vocab_size, (EOS,) if vocab_size > EOS else ())
        sequence = harness.sequence([1, 2], sampling(CHOICE))
        mask = grammars.allowed(sequence, 2)
        assert mask.shape == (vocab_size,)
        assert mask.sum() == 2
        assert mask.nonzero()[0].max() < 256


def test_a_slow_grammar_holds_up_no_sequence_of_another(tokenizer: Path, harness: Any) -> None:
    grammars = Grammars(tokenizer, 272, (EOS,))
    grammars.compile(CHOICE)
    slow = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 70001}')
    compiling = threading.Thread(target=grammars.compile, args=(slow,))
    compiling.start()
    for _ in range(20):
        grammars.allowed(harness.sequence([1, 2], sampling(CHOICE)), 2)
    assert compiling.is_alive()
    assert not grammars.has(slow)
    compiling.join()
    assert grammars.has(slow)


def test_a_prepared_model_reads_its_tokenizer_no_more(tokenizer: Path, tmp_path: Path, harness: Any) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_text(tokenizer.read_text())
    grammars = Grammars(copy, 272, (EOS,))
    assert grammars.is_unprepared
    grammars.prepare()
    copy.unlink()
    grammars.compile(REGEX)
    assert not grammars.is_unprepared
    assert not Grammars(copy, 272, (EOS,)).is_unprepared, "nothing to read"


def test_compiled_grammars_are_forgotten_when_there_are_many(tokenizer: Path) -> None:
    grammars = Grammars(tokenizer, 272, (EOS,))
    many = [Grammar(GrammarKind.REGEX, f"a{{{n}}}") for n in range(1, 100)]
    for one in many:
        grammars.compile(one)
    assert sum(grammars.has(one) for one in many) == module.MAX_COMPILED
    assert grammars.has(many[-1])


def test_a_panic_of_the_library_is_the_error_of_its_request(
    tokenizer: Path, harness: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """What Rust's panics become in Python."""

    def panic(_: Grammar) -> str:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(module, "_source", panic)
    first, second = harness.step([harness.sequence(prompt(5), sampling(REGEX)), harness.sequence(prompt(5))])
    assert "index out of bounds" in first.error.message
    assert second.error is None
