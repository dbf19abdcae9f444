from typing import Any

import pytest

from nearline.engine import EngineLoad, SampledToken
from nearline.protocol import FinishReason, Pooling
from nearline.protocol.errors import ErrorInfo, UnsupportedCheckpoint
from tests.engine.fake_engine import Engine, info, make_request, solo


def test_a_request_generates_what_it_would_alone_and_ends_by_length() -> None:
    engine, request = Engine(), make_request("a", [3, 4, 5], max_tokens=6, ignore_eos=True)
    engine.add(request)
    engine.drain()
    assert engine.outputs["a#1"] == solo(request)
    assert engine.ends["a#1"].finish_reason is FinishReason.LENGTH
    assert engine.core.load.kv_tokens_used == 0


def test_the_token_that_stops_a_sequence_is_its_last() -> None:
    free = solo(make_request("a", [3, 4, 5], max_tokens=6, ignore_eos=True))
    request = make_request("a", [3, 4, 5], max_tokens=6, ignore_eos=True, stop_token_ids=(free[2],))
    engine = Engine()
    engine.add(request)
    engine.drain()
    assert engine.outputs["a#1"] == free[: free.index(free[2]) + 1]
    assert engine.ends["a#1"].finish_reason is FinishReason.STOP


def test_end_of_text_ends_a_sequence_unless_it_is_ignored_or_too_early() -> None:
    free = Engine()
    free.add(make_request("free", [3, 4], max_tokens=8, ignore_eos=True))
    free.drain()
    tokens = free.outputs["free#1"]
    checkpoint = info(eos_token_ids=(tokens[1], tokens[4]))
    cases = {"plain": ({}, 2), "ignored": ({"ignore_eos": True}, 8), "early": ({"min_tokens": 3}, 5)}
    for name, (sampling, expected) in cases.items():
        engine = Engine(checkpoint=checkpoint)
        engine.add(make_request(name, [3, 4], max_tokens=8, **sampling))
        engine.drain()
        assert engine.outputs[f"{name}#1"] == tokens[:expected], name


def test_the_context_ends_a_sequence_and_a_full_prompt_still_gets_one_token() -> None:
    engine = Engine(num_blocks=32)
    for name, length, expected in (("a", 60, 4), ("b", 64, 1)):
        engine.add(make_request(name, [1 + i % 40 for i in range(length)], max_tokens=100, ignore_eos=True))
        engine.drain()
        assert len(engine.outputs[f"{name}#1"]) == expected
        assert engine.ends[f"{name}#1"].finish_reason is FinishReason.LENGTH


def test_a_small_kv_cache_ends_a_sequence_instead_of_hanging() -> None:
    engine = Engine(num_blocks=2)
    engine.add(make_request("a", [1, 2, 3], max_tokens=50, ignore_eos=True))
    engine.drain()
    assert len(engine.outputs["a#1"]) == 6  # 3 + 6 tokens, the last never fed: 8 positions
    engine.add(make_request("b", [1] * 9))
    error = engine.ends["b#1"].error
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "9 tokens" in error.message


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": []}, "invalid_request", "prompt"),
    ({"prompt": [50]}, "invalid_request", "prompt"),
    ({"prompt": [-1]}, "invalid_request", "prompt"),
    ({"prompt": [1] * 65}, "context_length_exceeded", "prompt"),
    ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    ({"pooling": Pooling.LAST, "prompt_logprobs": 0}, "invalid_request", "input"),
    ({"pooling": Pooling.LAST, "prompt": [50]}, "invalid_request", "prompt"),
    ({"prompt_logprobs": 0, "max_tokens": -1}, "invalid_request", "max_tokens"),
    ({"min_tokens": 9}, "invalid_request", "min_tokens"),
    ({"temperature": -1.0}, "invalid_request", "temperature"),
    ({"temperature": float("nan")}, "invalid_request", "sampling"),
    ({"top_p": 0.0}, "invalid_request", "top_p"),
    ({"logit_bias": ((50, 1.0),)}, "invalid_request", "logit_bias"),
    ({"adapter_digest": "never-announced"}, "not_found", None),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_request_fails_alone(fields: dict[str, Any], code: str, param: str | None) -> None:  # fmt: skip
    engine, good = Engine(), make_request("good", [1, 2, 3])
    engine.add(good)
    engine.step()
    engine.add(make_request("bad", **({"prompt": [1]} | fields)))
    engine.drain()
    assert engine.ends["bad#1"].finish_reason is FinishReason.ERROR
    assert (engine.ends["bad#1"].error.code, engine.ends["bad#1"].error.param) == (code, param)
    assert engine.outputs["good#1"] == solo(good)


def test_a_request_that_only_reads_its_prompt_ends_without_a_token_and_takes_nothing_from_the_cache() -> None:
    engine, prompt = Engine(), [1 + i % 40 for i in range(64)]
    engine.add(make_request("warm", prompt[:32]))
    engine.drain()
    engine.add(make_request("scored", prompt, max_tokens=0, prompt_logprobs=1))
    engine.add(make_request("mean", prompt[:40], pooling=Pooling.MEAN))
    engine.add(make_request("last", prompt[:40], pooling=Pooling.LAST))
    engine.drain()
    ends = [engine.ends[f"{name}#1"] for name in ("scored", "mean", "last")]
    assert [end.finish_reason for end in ends] == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP]
    assert [end.embedding for end in ends] == [None, b"vector", b"vector"]
    assert [end.timings.num_cached_tokens > 0 for end in ends] == [False, False, True]
    assert ends[0].prompt_logprobs == ()
    assert all(end.token_ids == () for end in ends)


def test_a_token_that_completes_its_grammar_is_the_last_even_where_length_ends_it_too() -> None:
    for max_tokens in (1, 9):
        engine = Engine()
        engine.add(make_request("a", [1, 2], max_tokens=max_tokens, ignore_eos=True))
        batch = engine.core.schedule(engine.tick())
        assert batch is not None
        (update,) = engine.core.commit(batch, [SampledToken(7, is_last=True)], engine.tick())
        assert (update.token_ids, update.finish_reason) == ((7,), FinishReason.STOP)
        engine.core.check()


def test_a_resumed_request_continues_without_repeating() -> None:
    request = make_request("a", [5, 6, 7, 8, 9], max_tokens=7, ignore_eos=True)
    whole = solo(request)
    for cut in range(8):
        engine = Engine()
        engine.add(request, attempt=cut + 1, generated=tuple(whole[:cut]))
        engine.drain()
        assert engine.outputs.get(f"a#{cut + 1}", []) == whole[cut:]
        assert engine.ends[f"a#{cut + 1}"].finish_reason is FinishReason.LENGTH


def test_a_later_attempt_replaces_an_earlier_one_in_silence() -> None:
    engine, request = Engine(), make_request("a", [5, 6, 7], max_tokens=5, ignore_eos=True)
    engine.add(request)
    engine.step()
    first = tuple(engine.outputs["a#1"])
    engine.add(request, attempt=2, generated=first)
    engine.add(request, attempt=1)
    engine.drain()
    assert "a#1" not in engine.ends
    assert list(first) + engine.outputs["a#2"] == solo(request)
    assert engine.core.num_added == engine.core.num_ended == 2


def test_an_abort_frees_the_blocks_at_once_and_says_nothing() -> None:
    engine = Engine()
    engine.add(make_request("running", list(range(1, 20)), max_tokens=20))
    engine.step()
    engine.add(make_request("waiting", [1, 2]))
    assert engine.core.load.num_running == 1
    assert engine.core.load.kv_tokens_used > 0
    for name in ("running", "waiting", "waiting", "unknown"):
        engine.core.abort(name, engine.tick())
    assert engine.core.load == EngineLoad(0, 0, 0)
    assert engine.step() is None
    assert engine.ends == {}
    engine.core.check()


def test_an_abort_between_schedule_and_commit_drops_the_token() -> None:
    engine = Engine()
    engine.add(make_request("a", [1, 2, 3]))
    engine.add(make_request("b", [4, 5]))
    batch = engine.core.schedule(engine.tick())
    sampled = engine.device.run(batch)
    engine.core.abort("a", engine.tick())
    updates = engine.core.commit(batch, sampled, engine.tick())
    assert [u.request_id for u in updates] == ["b"]
    engine.core.check()


def test_a_sampling_error_fails_that_sequence_alone() -> None:
    engine, good = Engine(), make_request("good", [4, 5])
    engine.add(make_request("bad", [1, 2, 3]))
    engine.add(good)
    batch = engine.core.schedule(engine.tick())
    tokens = engine.device.run(batch)
    names = [item.sequence.request.request_id for item in batch.items if item.is_sampled]
    error = ErrorInfo("internal_error", "not a number")
    tokens = [SampledToken(0, error=error) if n == "bad" else t for n, t in zip(names, tokens, strict=True)]
    engine.note(engine.core.commit(batch, tokens, engine.tick()))
    engine.drain()
    assert engine.ends["bad#1"].error == error
    assert engine.outputs["good#1"] == solo(good)


def test_the_first_token_carries_timings_whose_parts_add_up() -> None:
    engine = Engine(max_running=1)
    engine.core.load_adapter("x", "/x")
    engine.core.adapter_actions()
    for name, adapter in (("first", None), ("second", "x")):
        engine.add(make_request(name, [1, 2, 3], max_tokens=2, ignore_eos=True, adapter_digest=adapter))
    updates = []
    engine.core.adapter_loaded("x", 10, 5.0)
    for now in (10.0, 20.0, 30.0):
        batch = engine.core.schedule(now)
        updates += engine.core.commit(batch, engine.device.run(batch), now + 4.0)
    first, _, second = updates
    assert (first.timings.waiting_s, first.timings.adapter_s, first.timings.prefill_s) == (9.0, 0.0, 4.0)
    assert (second.timings.waiting_s, second.timings.adapter_s, second.timings.prefill_s) == (25.0, 3.0, 4.0)
    assert updates[1].timings is None


def test_a_failed_adapter_fails_its_sequences_and_nobody_else() -> None:
    engine, base = Engine(), make_request("base", [1, 2])
    engine.core.load_adapter("x", "/x")
    engine.add(make_request("adapted", [1, 2], adapter_digest="x"))
    engine.add(base)
    engine.core.adapter_actions()
    engine.drain()
    assert engine.outputs == {"base#1": solo(base)}
    error = ErrorInfo.of(UnsupportedCheckpoint("no such module"))
    engine.note(engine.core.adapter_failed("x", error, engine.tick()))
    assert engine.ends["adapted#1"].error == error
    engine.add(make_request("late", [1, 2], adapter_digest="x"))
    assert engine.ends["late#1"].error == error
    engine.core.check()


def test_the_second_prompt_of_a_shared_prefix_computes_only_what_differs() -> None:
    engine = Engine(max_step_tokens=None)
    prefix = list(range(1, 13))
    engine.add(make_request("a", [*prefix, 20]))
    engine.drain()
    engine.add(make_request("b", [*prefix, 30]))
    batch = engine.step()
    assert [(item.start, item.num_tokens) for item in batch.items] == [(12, 1)]
    assert engine.core.blocks.num_hit_tokens == 12
    engine.add(make_request("salted", [*prefix, 30], salt="other tenant"))
    assert [item.start for item in engine.step().items if item.sequence.request.request_id == "salted"] == [0]


def test_a_prompt_that_is_wholly_known_still_computes_its_last_token_in_a_block_of_its_own() -> None:
    engine, prompt = Engine(max_step_tokens=None), list(range(1, 9))
    first = make_request("a", prompt, max_tokens=9, ignore_eos=True)
    engine.add(first)
    engine.step()
    engine.add(make_request("b", prompt, max_tokens=9, ignore_eos=True))
    batch = engine.step()
    assert [(i.start, i.num_tokens) for i in batch.items if i.sequence.request.request_id == "b"] == [(7, 1)]
    assert len(batch.block_copies) == 1
    engine.drain()
    assert engine.outputs["a#1"] == engine.outputs["b#1"] == solo(first)


def test_a_known_block_that_will_be_written_again_is_not_shared_meanwhile() -> None:
    engine, prompt = Engine(max_step_tokens=None), list(range(1, 9))
    requests = [make_request(name, tokens, max_tokens=5, ignore_eos=True)
                for name, tokens in (("first", prompt), ("same", prompt), ("longer", [*prompt, 30, 31]))]  # fmt: skip
    engine.add(requests[0])
    engine.drain()
    for request in requests[1:]:
        engine.add(request)
    batch = engine.step()
    assert batch is not None
    assert [(item.start, item.num_tokens) for item in batch.items] == [(7, 1), (4, 6)]
    engine.drain()
    assert engine.outputs == {f"{request.request_id}#1": solo(request) for request in requests}
