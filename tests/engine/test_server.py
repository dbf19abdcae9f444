"""The engine process end to end: a real process, a tiny real model, transformers and peft as oracles."""

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nearline.protocol import Digest, Extent, FinishReason, Grammar, GrammarKind, Pooling, Request
from nearline.protocol.frames import (
    Abort,
    AdapterBytes,
    AdapterEvicted,
    AdapterLoaded,
    AdapterWanted,
    BindFailed,
    ExtentsFree,
    LoadAdapter,
    StepDone,
    UnloadAdapter,
)
from tests.engine.checkpoints import Oracle
from tests.engine.engine_process import FRAME_BYTES, INSTANCE, NUM_FRAMES, EngineUnderTest
from tests.engine.fake_engine import make_request


def request(name: str, prompt: list[int], max_tokens: int = 12, **fields: Any) -> Request:
    return make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True, **fields)


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineUnderTest]:
    engine = EngineUnderTest("--step-tokens", "40")
    yield engine
    logged = engine.close()
    assert engine.exit_code() == 0, "it ends quietly when the agent closes the socket"
    assert "Traceback" not in logged.split("cannot bind")[0]


@pytest.fixture
def engine(shared: EngineUnderTest, checkpoints: dict[str, Path]) -> Iterator[EngineUnderTest]:
    """An engine bound to model a, its inbox empty."""
    shared.inbox.clear()
    shared.bind(checkpoints["a"])
    yield shared
    shared.unbind()


def test_tokens_stream_one_by_one_and_equal_transformers(engine: EngineUnderTest, oracles: dict[str, Oracle]) -> None:
    prompt = prompts(1)[0]
    assert engine.generate(request("r", prompt)) == [oracles["a"](prompt)]
    updates = engine.updates("r")
    assert [len(update.token_ids) for update in updates] == [1] * 12
    assert updates[0].timings is not None
    assert [update.finish_reason for update in updates] == [None] * 11 + [FinishReason.LENGTH]


def test_eight_together_equal_each_alone(engine: EngineUnderTest, oracles: dict[str, Oracle]) -> None:
    wanted = prompts(8)
    together = engine.generate(*[request(f"r{i}", prompt) for i, prompt in enumerate(wanted)])
    assert together == [oracles["a"](prompt) for prompt in wanted]
    assert max(step.num_running for step in engine.inbox if isinstance(step, StepDone)) > 1


def test_a_resumed_request_goes_on_where_it_was(engine: EngineUnderTest, oracles: dict[str, Oracle]) -> None:
    prompt = prompts(2)[1]
    whole = oracles["a"](prompt)
    engine.submit(request("r", prompt), attempt=3, generated=tuple(whole[:5]))
    tokens, last = engine.outcome("r")
    assert (tokens, last.attempt) == (whole[5:], 3)


def test_an_abort_frees_its_blocks_within_a_step(engine: EngineUnderTest) -> None:
    engine.submit(request("r", [1, 2, 3], max_tokens=400))
    engine.expect(StepDone, where=lambda step: bool(step.updates))
    engine.send(Abort(INSTANCE, "r"))
    step = engine.expect(StepDone, where=lambda step: step.num_running == 0)
    assert (step.num_waiting, step.kv_tokens_used) == (0, 0)
    time.sleep(0.05)
    assert engine.updates("r")[-1].finish_reason is None
    assert len(engine.generate(request("next", [4, 5]))[0]) == 12


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "invalid_request"),
    ({"prompt": [272]}, "invalid_request"),
    ({"prompt": [1] * 513}, "context_length_exceeded"),
    ({"prompt": [1], "adapter_digest": "f" * 32}, "not_found"),
]


@pytest.mark.parametrize(("fields", "code"), BAD, ids=[code for _, code in BAD])
def test_a_bad_request_fails_alone(engine: EngineUnderTest, fields: dict[str, Any], code: str) -> None:
    engine.submit(request("good", [1, 2]), request("bad", **fields))
    _, last = engine.outcome("bad")
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error.code == code
    assert len(engine.outcome("good")[0]) == 12


def test_adapters_answer_as_peft_does_in_one_batch_with_the_base(
    engine: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    digests = {name: checkpoints[name].name for name in ("lora4", "lora8")}
    wanted = prompts(6, longest=20)
    names = ["a", "lora4", "lora8", "lora4", "a", "lora8"]
    for name in ("lora4", "lora8"):
        engine.send(LoadAdapter(digests[name], str(checkpoints[name])))
    requests = [request(f"r{i}", prompt, adapter_digest=digests.get(name))
                for i, (name, prompt) in enumerate(zip(names, wanted, strict=True))]  # fmt: skip
    engine.submit(*requests)
    answers = [engine.outcome(f"r{i}")[0] for i in range(6)]
    assert answers == [oracles[name](prompt) for name, prompt in zip(names, wanted, strict=True)]
    loaded = [message for message in engine.inbox if isinstance(message, AdapterLoaded)]
    assert {message.digest for message in loaded} == set(digests.values())
    assert all(message.error is None and message.num_bytes > 0 for message in loaded)
    assert oracles["a"](wanted[1]) != answers[1]


def test_unloading_an_adapter_waits_for_the_sequence_that_uses_it(
    engine: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    digest, prompt = checkpoints["lora4"].name, [5, 6, 7]
    engine.send(LoadAdapter(digest, str(checkpoints["lora4"])))
    engine.submit(request("running", prompt, adapter_digest=digest))
    engine.send(UnloadAdapter(digest))
    engine.submit(request("late", prompt, adapter_digest=digest))
    assert engine.outcome("running")[0] == oracles["lora4"](prompt)
    _, last = engine.outcome("late")
    assert last.error is not None
    assert last.error.code == "not_found"


def lend(engine: EngineUnderTest, directory: Path, lease_id: int) -> AdapterBytes:
    """Put an adapter somewhere into a frame that no model has, as the agent does."""
    data = (directory / "model.safetensors").read_bytes()
    frame = (engine.frames[-1] + 1) % NUM_FRAMES
    extent = Extent(frame * FRAME_BYTES + (1 << 18) * (lease_id % 16), len(data))
    os.pwrite(engine.pool.fd, data, extent.offset)
    return AdapterBytes(Digest(directory.name), (extent,), lease_id)


def await_free(engine: EngineUnderTest, *lease_ids: int) -> None:
    """Wait until exactly these leases have come back since the inbox was empty, each once."""
    while len(freed := [m.lease_id for m in engine.inbox if isinstance(m, ExtentsFree)]) < len(lease_ids):
        engine.expect(ExtentsFree)
    assert sorted(freed) == list(lease_ids)


def test_adapters_lent_from_the_pool_are_read_once_and_given_back(
    engine: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle], tmp_path: Path
) -> None:
    """Their directory has the manifest alone; another adapter takes their place as soon as they are given back."""
    prompt, digests = [5, 6, 7], [checkpoints[name].name for name in ("lora4", "lora8")]
    for digest in digests:
        (tmp_path / digest).mkdir()
        shutil.copy(checkpoints["lora4"].parent / digest / "manifest.json", tmp_path / digest)
    for turn in range(3):
        for name, digest in zip(("lora4", "lora8"), digests, strict=True):
            lent = lend(engine, checkpoints[name], lease_id=100 + turn)
            engine.send(LoadAdapter(Digest(digest), str(tmp_path / digest), is_pooled=True, lent=lent))
            engine.submit(request(f"{name}-{turn}", prompt, adapter_digest=digest))
            assert engine.outcome(f"{name}-{turn}")[0] == oracles[name](prompt)
            await_free(engine, lent.lease_id)
            engine.inbox.clear()
            engine.send(UnloadAdapter(Digest(digest)))
    assert not any(isinstance(message, AdapterWanted) for message in engine.inbox)


def test_an_adapter_that_is_not_lent_is_asked_for_and_waits_without_holding_up_others(
    engine: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    directory, prompt = checkpoints["lora4"], [5, 6, 7]
    engine.send(LoadAdapter(Digest(directory.name), str(directory), is_pooled=True))
    engine.submit(request("adapted", prompt, adapter_digest=directory.name), request("base", prompt))
    assert engine.expect(AdapterWanted).digest == directory.name
    assert engine.outcome("base")[0] == oracles["a"](prompt)
    assert not engine.updates("adapted")
    engine.send(lend(engine, directory, 1), lend(engine, directory, 2))
    assert engine.outcome("adapted")[0] == oracles["lora4"](prompt)
    await_free(engine, 1, 2)
    engine.unbind()
    engine.send(lend(engine, directory, 3))  # an answer that has come too late
    await_free(engine, 1, 2, 3)
    engine.send(LoadAdapter(Digest("f" * 32), "/", is_pooled=True, lent=lend(engine, directory, 4)))
    await_free(engine, 1, 2, 3, 4)


def test_an_adapter_that_is_gone_from_disk_fails_its_request_alone(engine: EngineUnderTest, tmp_path: Path) -> None:
    engine.send(LoadAdapter("e" * 32, str(tmp_path / "gone")))
    engine.submit(request("adapted", [1], adapter_digest="e" * 32), request("base", [1]))
    assert engine.outcome("adapted")[1].finish_reason is FinishReason.ERROR
    assert [m.error is not None for m in engine.inbox if isinstance(m, AdapterLoaded)] == [True]
    assert len(engine.outcome("base")[0]) == 12


def test_the_first_request_follows_the_bytes(
    shared: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    shared.inbox.clear()
    shared.bind(checkpoints["b"], is_filled=False)
    shared.submit(request("r", [9, 8, 7]))
    time.sleep(0.2)
    assert shared.updates("r") == []
    shared.pool.fill(checkpoints["b"], shared.frames)
    assert shared.outcome("r")[0] == oracles["b"]([9, 8, 7])
    shared.unbind()


def test_it_is_bound_to_one_model_after_another_and_gives_memory_back(
    shared: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    expected = {name: oracles[name]([1, 2, 3]) for name in ("a", "b")}
    assert expected["a"] != expected["b"]
    sizes = []
    for round_ in range(8):
        for name in ("a", "b"):
            shared.inbox.clear()
            shared.bind(checkpoints[name], kv_bytes=4 << 20)
            assert shared.generate(request("r", [1, 2, 3])) == [expected[name]]
            shared.submit(request("cut", [1], max_tokens=400))
            shared.unbind()
        sizes.append(_private_bytes(shared.process.pid) if round_ >= 3 else 0)
    assert sizes[-1] - sizes[3] < 4 << 20, sizes
    # An idle engine maps every frame of the pool once, ahead of need; a bound range that was left would come on top.
    assert _mapped_bytes(shared.process.pid, "memfd:pool") == os.fstat(shared.pool.fd).st_size


def _mapped_bytes(pid: int, name: str) -> int:
    lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if name in line]
    spans = [line.split()[0].split("-") for line in lines]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def _private_bytes(pid: int) -> int:
    """The process's own memory; pages of the pool, mapped ahead, are not its own."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_what_cannot_be_bound_says_why_and_the_process_stays(
    shared: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    shared.inbox.clear()
    shared.submit(request("early", [1]))
    error = shared.outcome("early")[1].error
    assert error is not None
    assert error.code == "instance_failed"
    failed = shared.try_bind(checkpoints["a"], kv_bytes=10)
    assert isinstance(failed, BindFailed)
    assert failed.error.code == "out_of_memory"
    shared.bind(checkpoints["a"])
    assert shared.generate(request("r", [1, 2])) == [oracles["a"]([1, 2])]
    shared.unbind()


def test_a_prompt_is_scored_and_embedded_beside_others(engine: EngineUnderTest, oracles: dict[str, Oracle]) -> None:
    import numpy as np
    import torch

    prompt = [(3 * i) % 256 for i in range(90)]  # three chunks of 40 tokens
    with torch.inference_mode():
        output = oracles["a"].model(torch.tensor([prompt]), output_hidden_states=True)
    engine.generate(make_request("warm", prompt))  # what is cached must be read all the same
    scored = make_request("scored", prompt, max_tokens=0, prompt_logprobs=0)
    engine.submit(scored, make_request("mean", prompt, pooling=Pooling.MEAN), request("plain", prompt))
    end = engine.outcome("scored")[1]
    assert end.finish_reason is FinishReason.LENGTH
    exact = output.logits[0].log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).flatten()
    assert [one.logprob for one in end.prompt_logprobs or ()] == pytest.approx(exact.tolist(), abs=1e-4)
    vector = np.frombuffer(engine.outcome("mean")[1].embedding or b"", "<f4")
    assert vector == pytest.approx(output.hidden_states[-1][0].mean(0).numpy(), abs=1e-4)
    assert engine.outcome("plain")[0] == oracles["a"](prompt)


def test_an_engine_prepares_for_grammars_when_it_has_nothing_to_do(checkpoints: dict[str, Path]) -> None:
    engine = EngineUnderTest()
    engine.bind(checkpoints["a"])
    engine.generate(request("r", prompts(1)[0]))
    assert engine.process.stderr is not None
    logged, prepared = "", "prepared for structured output"
    while prepared not in logged:
        logged += os.read(engine.process.stderr.fileno(), 1 << 16).decode()
        assert engine.process.poll() is None
    engine.generate(request("grammar", prompts(1)[0], grammar=Grammar(GrammarKind.REGEX, "[0-9]{4}")))
    assert (logged + engine.close()).count(prepared) == 1


def test_grammars_are_compiled_beside_the_others_and_bad_ones_harm_nobody(
    engine: EngineUnderTest, oracles: dict[str, Oracle]
) -> None:
    prompt, good = prompts(1)[0], Grammar(GrammarKind.REGEX, "[0-9]{4}")
    bad = [Grammar(GrammarKind.REGEX, "("), Grammar(GrammarKind.JSON_SCHEMA, "[]"), Grammar(GrammarKind.LARK, "%%")]
    for order in ([good, *bad], [*bad, good]):
        engine.inbox.clear()
        engine.submit(request("plain", prompt))
        for index, grammar in enumerate(order):
            engine.submit(
                request(f"g{index}", prompt, grammar=grammar), request(f"gone{index}", prompt, grammar=grammar)
            )
            engine.send(Abort(INSTANCE, f"gone{index}"))
        assert engine.outcome("plain")[0] == oracles["a"](prompt)
        for index, grammar in enumerate(order):
            tokens, end = engine.outcome(f"g{index}")
            if grammar is good:
                assert (len(tokens), end.finish_reason) == (4, FinishReason.STOP)
            else:
                assert end.error is not None
                assert (end.error.code, end.error.param, tokens) == ("invalid_request", "grammar", [])
            assert [u.finish_reason for u in engine.updates(f"gone{index}") if u.finish_reason] == []
    whole = engine.outcome(f"g{len(order) - 1}")[0]
    engine.submit(request("resumed", prompt, grammar=good), attempt=2, generated=tuple(whole[:2]))
    assert engine.outcome("resumed")[0] == whole[2:]


def test_an_adapter_that_makes_place_for_another_is_said_to_be_gone(
    shared: EngineUnderTest, checkpoints: dict[str, Path]
) -> None:
    digests = [checkpoints[name].name for name in ("lora4", "lora8")]

    def use(digest: str) -> AdapterLoaded:
        shared.inbox.clear()
        shared.send(LoadAdapter(digest, str(checkpoints["a"].parent / digest)))
        shared.generate(request(f"of {digest}", [1, 2, 3], adapter_digest=digest))
        return next(message for message in shared.inbox if isinstance(message, AdapterLoaded))

    shared.bind(checkpoints["a"])
    sizes = [use(digest).num_bytes for digest in digests]
    assert not any(isinstance(message, AdapterEvicted) for message in shared.inbox)
    shared.unbind()
    shared.bind(checkpoints["a"], kv_bytes=sum(sizes))  # of which adapters may take half
    for digest, other in zip(digests, reversed(digests), strict=True):
        use(digest)
        assert use(other).digest == other
        assert [m.digest for m in shared.inbox if isinstance(m, AdapterEvicted)] == [digest]
    shared.unbind()
