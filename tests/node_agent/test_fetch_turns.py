"""Fetches beside imports: no start waits for an import, a source is read once at a time, no name loses its bytes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nearline.node_agent.import_process import ImportProcess
from nearline.node_agent.imports import MAX_RUNNING, Imports
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest, TaskId, peer_source, to_plain
from nearline.protocol.errors import CheckpointCorrupt
from nearline.protocol.frames import ImportCheckpoint, ImportFinished

WAIT_S = 60


def info(digest: str, source: str) -> CheckpointInfo:
    return CheckpointInfo(Digest(digest), CheckpointKind.MODEL, 9, "llama", "L", source, "float32", ())


class Process:
    """An importing process that says what the test has it say."""

    def __init__(self, bench: "Bench") -> None:
        self.bench = bench
        self.is_alive = True
        self.words: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def ask(self, wish: ImportCheckpoint) -> AsyncIterator[dict[str, Any]]:
        self.bench.processes.setdefault(wish.source, []).append(self)
        self.bench.news.set()
        while True:
            said = await self.words.get()
            yield said
            if "checkpoint" in said:
                return

    async def end(self) -> None:
        self.is_alive = False
        self.bench.news.set()


class Bench:
    """Imports over scripted processes, and a store that only notes what is deleted."""

    def __init__(self) -> None:
        self.processes: dict[str, list[Process]] = {}
        self.news = asyncio.Event()
        self.remote: dict[Digest, CheckpointInfo] = {}
        self.deleted: list[Digest] = []
        self.said: list[Any] = []
        store = SimpleNamespace(
            is_remote=lambda digest: digest in self.remote,
            manifest=lambda digest: SimpleNamespace(info=self.remote[digest]),
            checkpoints=lambda: [SimpleNamespace(digest=digest) for digest in self.remote],
            adopt=lambda digest: self.remote.pop(digest, None),
            delete=self.deleted.append,
        )
        self.imports = Imports(Path("nowhere"), self._hear, store)  # type: ignore[arg-type]

    def _hear(self, message: object) -> None:
        self.said.append(message)
        self.news.set()

    def wish(self, source: str) -> None:
        self.imports.start(ImportCheckpoint(TaskId(source), CheckpointKind.MODEL, source))

    def fetch(self, digest: str, source: str) -> "tuple[asyncio.Task[None], list[int]]":
        self.remote[Digest(digest)] = info(digest, source)
        moves: list[int] = []
        return asyncio.create_task(self.imports.fetch(Digest(digest), lambda: moves.append(1))), moves

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.news.clear()
                await self.news.wait()

    async def process(self, source: str, number: int = 0) -> Process:
        await self.until(lambda: len(self.processes.get(source, [])) > number)
        return self.processes[source][number]

    async def finish(self, source: str, digest: str, number: int = 0) -> None:
        process = await self.process(source, number)
        process.words.put_nowait({"checkpoint": to_plain(info(digest, source))})


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    made = Bench()

    async def start(_: Path, environment: Mapping[str, str]) -> Process:
        return Process(made)

    monkeypatch.setattr(ImportProcess, "start", start)
    yield made
    await made.imports.close()


async def test_an_instance_does_not_wait_for_what_is_being_imported(bench: Bench) -> None:
    for number in range(MAX_RUNNING + 1):
        bench.wish(f"long-{number}")
    await bench.process(f"long-{MAX_RUNNING - 1}")
    fetching, _ = bench.fetch("d", "hub:org/d")
    await bench.finish("hub:org/d", "d")
    await asyncio.wait_for(fetching, WAIT_S)
    assert f"long-{MAX_RUNNING}" not in bench.processes, "imports are as few as ever"


async def test_two_instances_of_one_checkpoint_share_a_fetch_and_both_hear_how_it_goes_on(bench: Bench) -> None:
    (one, moves), (two, others) = bench.fetch("d", "hub:org/d"), bench.fetch("d", "hub:org/d")
    process = await bench.process("hub:org/d")
    for done_bytes in (10, 20, 20):
        process.words.put_nowait({"phase": "downloading", "done_bytes": done_bytes, "total_bytes": 90})
    await bench.finish("hub:org/d", "d")
    await asyncio.wait_for(asyncio.gather(one, two), WAIT_S)
    assert len(bench.processes["hub:org/d"]) == 1
    assert (len(moves), len(others)) == (2, 2), "what does not go on is no progress"


async def test_a_fetch_ends_when_nobody_waits_for_it_any_more_and_can_begin_anew(bench: Bench) -> None:
    (one, _), (two, _) = bench.fetch("d", "hub:org/d"), bench.fetch("d", "hub:org/d")
    process = await bench.process("hub:org/d")
    one.cancel()
    await asyncio.wait([one])
    assert process.is_alive
    two.cancel()
    again, _ = bench.fetch("d", "hub:org/d")
    await bench.finish("hub:org/d", "d", number=1)
    await asyncio.wait_for(again, WAIT_S)
    assert not process.is_alive, "the second began when the first had ended"


async def test_an_import_and_a_fetch_of_one_source_take_turns(bench: Bench) -> None:
    fetching, _ = bench.fetch("d", "hub:org/d")
    await bench.process("hub:org/d")
    bench.wish("hub:org/d")
    await asyncio.sleep(0.01)
    assert len(bench.processes["hub:org/d"]) == 1
    await bench.finish("hub:org/d", "d")
    await asyncio.wait_for(fetching, WAIT_S)
    await bench.finish("hub:org/d", "d", number=1)
    await bench.until(lambda: any(isinstance(said, ImportFinished) for said in bench.said))


@pytest.mark.parametrize("is_same", [True, False], ids=["of the source", "from a peer"])
async def test_a_fetch_that_waits_for_an_import_hears_how_it_goes_on_and_reads_nothing_again(
    bench: Bench, is_same: bool
) -> None:
    source = "hub:org/d" if is_same else peer_source(Digest("d"), ["http://one"])
    bench.wish(source)
    process = await bench.process(source)
    if not is_same:
        bench.imports.tell_peers(Digest("d"), ("http://two", "http://one"))
    fetching, moves = bench.fetch("d", "hub:org/d")
    await asyncio.sleep(0.01)
    for done_bytes in (10, 20, 20):
        process.words.put_nowait({"phase": "downloading", "done_bytes": done_bytes, "total_bytes": 90})
    await bench.until(lambda: len(moves) >= 2)
    await bench.finish(source, "d")
    await asyncio.wait_for(fetching, WAIT_S)
    assert len(moves) == 2
    assert bench.processes == {source: [process]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("hub:org/d", "int8:hub:org/d"),
        ("https://host/d", "int4:https://host/d"),
        ("hub:org/d@main", "hub:org/d"),
        ("peer:d@http://one", "peer:d@http://two,http://one"),
    ],
)
async def test_what_the_importer_reads_as_one_source_is_read_in_turns(bench: Bench, one: str, other: str) -> None:
    bench.wish(one)
    await bench.process(one)
    bench.wish(other)
    await asyncio.sleep(0.01)
    assert other not in bench.processes
    await bench.finish(one, "d")
    await bench.finish(other, "e")
    await bench.until(lambda: len([said for said in bench.said if isinstance(said, ImportFinished)]) == 2)


@pytest.mark.parametrize("is_first", [True, False], ids=["named before", "named after"])
async def test_what_a_changed_source_makes_stays_if_it_was_registered_meanwhile(bench: Bench, is_first: bool) -> None:
    fetching, _ = bench.fetch("old", "hub:org/d")
    await bench.process("hub:org/d")
    bench.wish("/a/copy")
    await bench.process("/a/copy")
    for source in ("/a/copy", "hub:org/d") if is_first else ("hub:org/d", "/a/copy"):
        await bench.finish(source, "new")
        if source == "hub:org/d":
            with pytest.raises(CheckpointCorrupt, match="not what it was"):
                await asyncio.wait_for(fetching, WAIT_S)
        else:
            await bench.until(lambda: any(isinstance(said, ImportFinished) for said in bench.said))
    await bench.imports.close()
    assert bench.deleted == []


async def test_what_a_changed_source_makes_goes_when_no_import_can_want_it(bench: Bench) -> None:
    fetching, _ = bench.fetch("old", "hub:org/d")
    await bench.process("hub:org/d")
    bench.wish("/another")
    await bench.process("/another")
    await bench.finish("hub:org/d", "new")
    with pytest.raises(CheckpointCorrupt, match="not what it was"):
        await asyncio.wait_for(fetching, WAIT_S)
    assert bench.deleted == [], "the import may find the same"
    bench.imports.cancel(TaskId("/another"))
    async with asyncio.timeout(WAIT_S):
        while not bench.deleted:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    assert bench.deleted == ["new"]
