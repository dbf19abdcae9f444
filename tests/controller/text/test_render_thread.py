"""Work in a thread that can be ended: short work has one thread, long work harms nobody, endless work ends."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from nearline.controller.text import render_thread
from nearline.controller.text.render_thread import RenderThread
from nearline.protocol.errors import Overloaded

NAME = "tested-renders"


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == NAME}


@pytest.fixture
async def renders(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RenderThread[object]]:
    monkeypatch.setattr(render_thread, "INLINE_S", 0.05)
    before = threads()
    yield RenderThread(NAME)
    async with asyncio.timeout(60):
        while len(threads() - before) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def ended(thread: threading.Thread) -> None:
    async with asyncio.timeout(60):
        while thread.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_one_thread_does_all_that_is_short(
    renders: RenderThread[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_thread, "INLINE_S", 60.0)
    found = {await renders.run(threading.current_thread, 60.0) for _ in range(20)}
    assert len(found) == 1
    assert found != {threading.current_thread()}


async def test_work_that_takes_long_keeps_nobody_waiting_and_is_not_done_twice(renders: RenderThread[object]) -> None:
    gate, calls = threading.Event(), []

    def slow() -> str:
        calls.append(1)
        gate.wait()
        return "slow"

    slow_ones = [asyncio.create_task(renders.run(slow, 60.0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert [await renders.run(lambda number=number: number, 60.0) for number in range(5)] == list(range(5))  # type: ignore[misc]
    gate.set()
    assert await asyncio.gather(*slow_ones) == ["slow"] * 3
    assert len(calls) == 3


async def test_two_that_may_take_long_run_at_once_and_the_quick_pass_them(
    renders: RenderThread[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, started = threading.Event(), []

    def slow() -> str:
        started.append(1)
        gate.wait()
        return "slow"

    slow_ones = [asyncio.create_task(renders.run(slow, 60.0, False)) for _ in range(6)]
    while len(started) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await renders.run(lambda: "quick", 60.0) == "quick"
    monkeypatch.setattr(render_thread, "MAX_WAIT_S", 0.05)
    with pytest.raises(Overloaded, match="try again"):
        await renders.run(slow, 60.0, False)
    assert len(started) == 2
    gate.set()
    assert await asyncio.gather(*slow_ones) == ["slow"] * 6


async def test_work_that_was_given_up_keeps_its_place_until_it_has_ended(
    renders: RenderThread[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [threading.Event() for _ in range(2)]
    for gate in gates:
        with pytest.raises(TimeoutError):
            await renders.run(gate.wait, 0.1, False)
    with monkeypatch.context() as patch:
        patch.setattr(render_thread, "MAX_WAIT_S", 0.05)
        with pytest.raises(Overloaded):
            await renders.run(lambda: "early", 60.0, False)
    monkeypatch.setattr(render_thread, "MAX_WAIT_S", 60.0)
    for gate in gates:
        gate.set()
    assert await renders.run(lambda: "after", 60.0, False) == "after"


class Spoiler:
    """What is raised while its finaliser runs is lost."""

    def __del__(self) -> None:
        for _ in range(100_000):
            pass


def stubborn() -> object:
    """Swallows the first attempts at ending it in handlers, and half of the others in finalisers."""
    for _ in range(2):
        try:
            while True:
                pass
        except BaseException:
            continue
    while True:
        Spoiler()
        for _ in range(100_000):
            pass


def answering() -> object:
    try:
        while True:
            pass
    except BaseException:
        return "a wrong answer"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", [stubborn, answering])
async def test_work_without_an_end_is_ended_and_whatever_it_makes_of_that_changes_nothing(
    renders: RenderThread[object], work: object
) -> None:
    seen: list[threading.Thread] = []

    def watched() -> object:
        seen.append(threading.current_thread())
        return work()  # type: ignore[operator]

    with pytest.raises(TimeoutError):
        await renders.run(watched, 0.2)
    assert await renders.run(lambda: "others go on", 60.0) == "others go on"
    await ended(seen[0])
    assert await renders.run(lambda: "and still", 60.0) == "and still"


async def test_a_caller_that_leaves_ends_its_work(renders: RenderThread[object]) -> None:
    seen: list[threading.Thread] = []

    def endless() -> object:
        seen.append(threading.current_thread())
        while True:
            pass

    leaving = asyncio.create_task(renders.run(endless, 60.0))
    while not seen:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await ended(seen[0])
