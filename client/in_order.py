"""Many calls at once whose outputs come in the order of what they were called for."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from itertools import islice
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")

PLACES_AHEAD = 16
"""How many times as many calls as run at once may be ahead of the outputs."""


async def in_order(call: Callable[[S], Coroutine[Any, Any, T]], items: Iterable[S], at_once: int) -> AsyncIterator[T]:
    """Yield what `call` returns for each item. `at_once` run at any time, also behind a slow one and while the outputs
    are used; they and the outputs that wait are never more than PLACES_AHEAD × `at_once`, and no more items are taken.

    Raises what a call or the items raise, in its place among the outputs. After a failure no call is started; those
    that run are cancelled when the iterator ends.
    """
    calls = _Calls(call, items, at_once)
    try:
        calls.start()
        while calls.ahead:
            yield await calls.next()
    finally:
        await calls.end()


class _Calls(Generic[S, T]):
    """Owns: the calls that run, and in `ahead` also what those that ended came to, by the order of the items."""

    def __init__(self, call: Callable[[S], Coroutine[Any, Any, T]], items: Iterable[S], at_once: int) -> None:
        self._call, self._coming, self._at_once = call, iter(items), at_once
        self._running: set[asyncio.Task[T]] = set()
        self.ahead: deque[asyncio.Future[T]] = deque()

    def start(self) -> None:
        """Fill the free places."""
        free = min(self._at_once - len(self._running), PLACES_AHEAD * self._at_once - len(self.ahead))
        try:
            for item in islice(self._coming, free):
                task = asyncio.create_task(self._call(item))
                self.ahead.append(task)
                self._running.add(task)
                task.add_done_callback(self._ended)
        except Exception as error:
            self._coming = iter(())
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            self.ahead.append(failed)

    async def next(self) -> T:
        output = await self.ahead[0]
        self.ahead.popleft()
        self.start()
        return output

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._running.discard(task)
        if task.cancelled() or task.exception():
            self._coming = iter(())
        self.start()

    async def end(self) -> None:
        self._coming = iter(())
        for future in self.ahead:
            future.cancel()
        await asyncio.gather(*self.ahead, return_exceptions=True)
