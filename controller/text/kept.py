"""What was worked out lately and is not worked out again."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """By key, at most `limit` of it. Who asks for the same at once waits for the same, which goes on when they leave.

    A failure is told to those who wait for it, and not kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: OrderedDict[K, asyncio.Task[V]] = OrderedDict()

    async def get(self, key: K, load: Callable[[], Coroutine[Any, Any, V]]) -> V:
        task = self._tasks.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._tasks[key] = asyncio.create_task(load())
        self._tasks.move_to_end(key)
        while len(self._tasks) > self._limit:
            self._tasks.popitem(last=False)
        return await asyncio.shield(task)

    def forget(self, is_meant: Callable[[K], bool]) -> None:
        for key in [key for key in self._tasks if is_meant(key)]:
            del self._tasks[key]

    async def close(self) -> None:
        """End what is still being worked out."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
