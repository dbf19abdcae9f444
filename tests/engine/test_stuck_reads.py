"""A disk that never answers: who waits for an adapter from it hears so after a bound, the others lose nothing."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearline.protocol import Digest
from nearline.protocol.frames import AdapterLoaded, AdapterWanted, LoadAdapter
from tests.engine.checkpoints import Oracle
from tests.engine.engine_process import EngineUnderTest
from tests.engine.test_server import await_free, lend, request

PROMPT = [5, 6, 7]


class Impatient(EngineUnderTest):
    """An engine that gives reads up after seconds, not a minute; a small read takes milliseconds."""

    PROGRAM = (
        "-c",
        "import sys; from nearline.engine import adapter_sources; adapter_sources.READ_LIMIT_S = 4.0; "
        "from nearline.engine.__main__ import main; sys.exit(main())",
    )


@pytest.fixture
def engine(checkpoints: dict[str, Path]) -> Iterator[EngineUnderTest]:
    made = Impatient("--step-tokens", "40")
    made.bind(checkpoints["a"])
    yield made
    made.unbind()
    made.close()
    assert made.exit_code() == 0


def fails_as_stuck(engine: EngineUnderTest, name: str) -> None:
    error = engine.outcome(name)[1].error
    assert error is not None
    assert error.code == "start_timeout"
    assert "was not read within 4 s" in error.message


def test_an_answer_that_does_not_come_ends_its_requests_and_one_that_comes_too_late_is_given_back(
    engine: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle]
) -> None:
    stuck, fine = checkpoints["lora4"], checkpoints["lora8"]
    wish = LoadAdapter(Digest(stuck.name), str(stuck), is_pooled=True)
    engine.send(wish, LoadAdapter(Digest(fine.name), str(fine)))
    engine.submit(*[request(name, PROMPT, adapter_digest=stuck.name) for name in ("one", "two")])
    engine.submit(request("fine", PROMPT, adapter_digest=fine.name), request("base", PROMPT))
    assert engine.outcome("fine")[0] == oracles["lora8"](PROMPT)
    assert engine.outcome("base")[0] == oracles["a"](PROMPT)
    for name in ("one", "two"):
        fails_as_stuck(engine, name)
    failed = [m.digest for m in engine.inbox if isinstance(m, AdapterLoaded) and m.error is not None]
    assert failed == [stuck.name]
    engine.send(lend(engine, stuck, 1))
    await_free(engine, 1)
    engine.inbox.clear()
    engine.send(wish)
    engine.submit(request("again", PROMPT, adapter_digest=stuck.name))
    engine.expect(AdapterWanted)
    engine.send(lend(engine, stuck, 2))
    assert engine.outcome("again")[0] == oracles["lora4"](PROMPT)
    await_free(engine, 2)


def hang(engine: EngineUnderTest, source: Path, stuck: Path) -> None:
    """Have an adapter read from a directory that never answers."""
    shutil.copytree(source, stuck)
    (stuck / "manifest.json").unlink()
    os.mkfifo(stuck / "manifest.json")
    engine.send(LoadAdapter(Digest(source.name), str(stuck)))
    engine.submit(request("stuck", PROMPT, adapter_digest=source.name))


def test_a_read_that_hangs_costs_those_that_wait_behind_it_their_turn_and_no_more(
    engine: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle], tmp_path: Path
) -> None:
    fine = checkpoints["lora8"]
    hang(engine, checkpoints["lora4"], tmp_path / "stuck")
    engine.send(LoadAdapter(Digest(fine.name), str(fine)))
    engine.submit(request("fine", PROMPT, adapter_digest=fine.name))
    fails_as_stuck(engine, "stuck")
    assert engine.outcome("fine")[0] == oracles["lora8"](PROMPT)


def test_the_next_instance_reads_its_adapters_though_a_read_of_the_last_one_hangs(
    engine: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle], tmp_path: Path
) -> None:
    fine = checkpoints["lora8"]
    hang(engine, checkpoints["lora4"], tmp_path / "stuck")
    engine.submit(request("base", PROMPT))
    engine.outcome("base")
    engine.unbind()
    engine.bind(checkpoints["a"])
    engine.send(LoadAdapter(Digest(fine.name), str(fine)))
    engine.submit(request("fine", PROMPT, adapter_digest=fine.name))
    assert engine.outcome("fine")[0] == oracles["lora8"](PROMPT)


@pytest.mark.parametrize("is_good", [True, False])
def test_a_read_that_hangs_holds_up_no_other_and_what_comes_of_it_late_is_dropped(
    engine: EngineUnderTest, checkpoints: dict[str, Path], oracles: dict[str, Oracle], tmp_path: Path, is_good: bool
) -> None:
    source, fine = checkpoints["lora4"], checkpoints["lora8"]
    stuck = tmp_path / source.name
    shutil.copytree(source, stuck)
    (stuck / "manifest.json").unlink()
    os.mkfifo(stuck / "manifest.json")  # whoever reads it waits until somebody writes
    lent = lend(engine, source, 1)
    engine.send(LoadAdapter(Digest(source.name), str(stuck), is_pooled=True, lent=lent))
    engine.submit(request("stuck", PROMPT, adapter_digest=source.name))
    fails_as_stuck(engine, "stuck")
    engine.send(LoadAdapter(Digest(fine.name), str(fine)))
    engine.submit(request("fine", PROMPT, adapter_digest=fine.name))
    assert engine.outcome("fine")[0] == oracles["lora8"](PROMPT)
    engine.inbox.clear()
    (stuck / "manifest.json").write_bytes((source / "manifest.json").read_bytes() if is_good else b"{")
    await_free(engine, 1)
    engine.submit(request("base", PROMPT))
    assert engine.outcome("base")[0] == oracles["a"](PROMPT)
    assert not any(isinstance(message, AdapterLoaded) for message in engine.inbox)
    engine.send(LoadAdapter(Digest(source.name), str(source)))
    engine.submit(request("again", PROMPT, adapter_digest=source.name))
    assert engine.outcome("again")[0] == oracles["lora4"](PROMPT)
