"""The synchronous SDK: the asynchronous one, driven from a private event loop thread."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, Self, TypeVar

from nearline.client.functions import AsyncCall, AsyncClient, AsyncFunction
from nearline.client.types import Output

T = TypeVar("T")


class LoopThread:
    """One event loop in a daemon thread; coroutines go in, results come out. A Ctrl-C cancels what is under way.

    Everything that runs on it holds it: it ends (after `at_end`) with the last of them, at exit, or by `close`.
    """

    def __init__(self, at_end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="nearline-client", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _shut, self._loop, thread, at_end)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self.close.alive:
            coroutine.close()
            raise RuntimeError("this client is closed; make another one")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """Pull an asynchronous iterator; leaving the loop early closes it, which ends the request on the server."""
        try:
            while True:
                try:
                    yield self.run(_next(source))
                except StopAsyncIteration:
                    return
        finally:
            if self.close.alive:
                self.run(_close(source))


def _shut(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, at_end: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    ending = asyncio.run_coroutine_threadsafe(at_end(), loop)
    if threading.current_thread() is thread:  # the collector ran there: waiting would be for ourselves
        ending.add_done_callback(lambda _: loop.stop())
        return
    ending.result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=5)
    loop.close()


async def _next(source: AsyncIterator[T]) -> T:
    return await anext(source)


async def _close(source: AsyncIterator[Any]) -> None:
    closing = getattr(source, "aclose", None)
    if closing is not None:
        await closing()


class Client:
    """A connection to one platform. Use as `with Client() as client`, call `close`, or drop it: it lives as long as
    what was made from it.

    >>> Client().function("smollm2").remote("What is the moon?").text      # doctest: +SKIP
    """

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self._client = AsyncClient(url, api_key)
        self._loop = LoopThread(self._client.aclose)
        self.admin = Admin(self._loop, self._client)

    def function(self, name: str) -> "Function":
        """Name a model, an adapter or `base:adapter`. Nothing is sent yet."""
        return Function(self._loop, self._client.function(name))

    def call(self, job_id: str) -> "Call":
        """Come back to a job submitted earlier, by any process."""
        return Call(self._loop, self._client.call(job_id))

    def models(self) -> list[dict[str, Any]]:
        """Every model and adapter that may be called."""
        return self._loop.run(self._client.models())

    def jobs(self, limit: int = 50) -> list[dict[str, Any]]:
        return self._loop.run(self._client.jobs(limit))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.close()


class Function:
    """One callable model; see AsyncFunction for what the arguments mean."""

    def __init__(self, loop: LoopThread, function: AsyncFunction) -> None:
        self._loop, self._function = loop, function
        self.name = function.name

    def remote(self, text: str | None = None, **options: Any) -> Output:
        """Invoke and wait for the whole answer."""
        return self._loop.run(self._function.remote(text, **options))

    def stream(self, text: str | None = None, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of the invocation as they come."""
        return self._loop.iterate(self._function.stream(text, **options))

    def spawn(self, text: str | None = None, *, idempotency_key: str | None = None, **options: Any) -> "Call":
        """Submit as a durable job."""
        return Call(self._loop, self._loop.run(self._function.spawn(text, idempotency_key=idempotency_key, **options)))

    def map(self, texts: Iterable[str], *, concurrency: int = 32, **options: Any) -> Iterator[Output]:
        """Invoke for each text, `concurrency` at once; yield the outputs in order. Texts may have no end; they are
        taken on the client's own thread, so they must not come from calls of this client."""
        return self._loop.iterate(self._function.map(texts, concurrency=concurrency, **options))


class Call:
    """A job: a call that goes on without its caller."""

    def __init__(self, loop: LoopThread, call: AsyncCall) -> None:
        self._loop, self._call = loop, call
        self.id = call.id

    def __repr__(self) -> str:
        return f"Call({self.id!r})"

    def status(self) -> dict[str, Any]:
        return self._loop.run(self._call.status())

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        return self._loop.run(self._call.wait(timeout_s))

    def result(self, timeout_s: float | None = None) -> Output:
        """Wait for the answer. Raises what the job failed with."""
        return self._loop.run(self._call.result(timeout_s))

    def cancel(self) -> dict[str, Any]:
        return self._loop.run(self._call.cancel())


class Admin:
    """The operator's side: register, list, show, remove."""

    def __init__(self, loop: LoopThread, client: AsyncClient) -> None:
        self._loop, self._admin = loop, client.admin

    def add(self, kind: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Register; yield progress events, then the registered object."""
        return self._loop.iterate(self._admin.add(kind, body))

    def list(self, kind: str) -> list[dict[str, Any]]:
        return self._loop.run(self._admin.list(kind))

    def fleet(self) -> dict[str, Any]:
        """Everything at one instant."""
        return self._loop.run(self._admin.fleet())

    def show(self, kind: str, name: str) -> dict[str, Any]:
        return self._loop.run(self._admin.show(kind, name))

    def change(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        return self._loop.run(self._admin.change(name, settings))

    def remove(self, kind: str, name: str) -> None:
        self._loop.run(self._admin.remove(kind, name))

    def verify(self, kind: str, name: str) -> Iterator[dict[str, Any]]:
        """Check bytes on SSD; yield progress events, then the result."""
        return self._loop.iterate(self._admin.verify(kind, name))

    def copy(self, kind: str, name: str, node: str | None = None) -> Iterator[dict[str, Any]]:
        """Copy bytes to another node; yield progress events, then the result."""
        return self._loop.iterate(self._admin.copy(kind, name, node))

    def profile(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure what a model's steps take; yield progress events, then the profile."""
        return self._loop.iterate(self._admin.profile(name))

    def evict(self, name: str) -> int:
        """Give a model's DRAM back; returns the bytes freed."""
        return self._loop.run(self._admin.evict(name))

    def is_ready(self) -> bool:
        return self._loop.run(self._admin.is_ready())
