"""Work that is nearly always short, in a thread, because only there can it be ended from outside when it is not."""

import asyncio
import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from nearline.protocol import Seconds
from nearline.protocol.errors import Overloaded

INLINE_S: Seconds = 0.005
"""How long the event loop itself waits for an answer: handing it over later costs more than most of the work does."""
AGAIN_S: Seconds = 0.05
"""Between two attempts at ending: what is raised in a finaliser is lost."""

MAX_SLOW = 2
"""At once; all threads share the interpreter, and with it everybody's time."""
MAX_WAIT_S: Seconds = 5.0

T = TypeVar("T")


class _Overdue(BaseException):
    """Raised inside work that ran too long. Not an Exception: a template must not catch it."""


class RenderThread(Generic[T]):
    """Runs one thing after the other. Owns: an idle thread; what takes long keeps its own, and others get a new one.

    What is not known to be quick has MAX_SLOW places, and leaves its own when it has really ended.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Thread[T]] = []
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    async def run(self, work: Callable[[], T], limit_s: Seconds, is_quick: bool = True) -> T:
        """Return what `work` returns; it raises nothing. Raises TimeoutError, and has it ended, after `limit_s`.

        Raises Overloaded when it is not known to be quick and finds no place within MAX_WAIT_S.
        """
        leave = _keep_no_place if is_quick else await self._place()
        thread = self._idle.pop() if self._idle else _Thread[T](self._name)
        job = _Job(work)
        thread.jobs.put(job)
        if not job.is_done.acquire(timeout=INLINE_S):
            try:
                async with asyncio.timeout(limit_s):
                    await job.done()
            except BaseException:
                thread.end(leave)
                raise
        leave()
        if self._idle:
            thread.jobs.put(None)
        else:
            self._idle.append(thread)
        return job.outcome

    async def _place(self) -> Callable[[], None]:
        """Take a place; returns what leaves it."""
        places = self._places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_SLOW))
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await places.acquire()
        except TimeoutError:
            text = "chat templates that take long are being rendered; try again"
            raise Overloaded(text, retry_after_s=MAX_WAIT_S) from None
        return places.release


class _Job(Generic[T]):
    """Shares no lock with the event loop that a thread could be ended in: it is waited for, then called back."""

    outcome: T

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.is_done = threading.Lock()
        self.is_done.acquire()

    def run(self) -> None:
        self.outcome = self._work()
        self.is_done.release()
        if self._waiter is not None:
            loop, future = self._waiter
            loop.call_soon_threadsafe(_wake, future)

    async def done(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = (loop, loop.create_future())
        if not self.is_done.acquire(blocking=False):  # it may have ended just before it could see the waiter
            await self._waiter[1]


def _keep_no_place() -> None:
    pass


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class _Thread(Generic[T]):
    def __init__(self, name: str) -> None:
        self.jobs: queue.SimpleQueue[_Job[T] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                job.run()
                del job
        except (_Overdue, RuntimeError):  # nobody waits any more, or the loop is closed
            pass

    def end(self, then: Callable[[], None]) -> None:
        """Raise in the thread, at the next instruction of Python that it runs, until it has ended."""
        self.jobs.put(None)
        if self._thread.ident is not None and self._thread.is_alive():
            ident = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_Overdue))
            asyncio.get_running_loop().call_later(AGAIN_S, self.end, then)
        else:
            then()
