"""The asynchronous SDK: `AsyncClient(url).function("name")` with `.remote() .stream() .spawn() .map()`."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any, Self
from urllib.parse import quote

from nearline.client.admin import AsyncAdmin
from nearline.client.config import client_config
from nearline.client.in_order import in_order
from nearline.client.transport import Transport, error_of
from nearline.client.types import Output, invocation, output_of
from nearline.protocol.errors import Cancelled, InvalidRequest, NearlineError, StartTimeout

TERMINAL = frozenset({"succeeded", "failed", "canceled", "expired"})
WAIT_SLICE_S = 50.0


class AsyncClient:
    """A connection to one platform. Use as `async with AsyncClient() as client`, or call `aclose`."""

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self._transport = Transport(client_config(url, api_key))
        self.admin = AsyncAdmin(self._transport)

    def function(self, name: str) -> "AsyncFunction":
        """Name a model, an adapter or `base:adapter`. Nothing is sent yet."""
        return AsyncFunction(self._transport, name)

    def call(self, job_id: str) -> "AsyncCall":
        """Come back to a job submitted earlier, by any process."""
        return AsyncCall(self._transport, job_id)

    async def models(self) -> list[dict[str, Any]]:
        """Every model and adapter that may be called: `id`, an adapter's `parent`, `max_model_len`."""
        listed = await self._transport.json("GET", "/v1/models")
        data: list[dict[str, Any]] = listed["data"]
        return data

    async def jobs(self, limit: int = 50) -> list[dict[str, Any]]:
        listed = await self._transport.json("GET", f"/v1/jobs?limit={limit}")
        data: list[dict[str, Any]] = listed["data"]
        return data

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()


class AsyncFunction:
    """One callable model. Text given as the first argument is one user message; pass `prompt=` for raw completion
    or `messages=` for a whole chat. Other keywords are sampling parameters of the invoke API."""

    def __init__(self, transport: Transport, name: str) -> None:
        self._transport = transport
        self.name = name
        self._path = f"/v1/functions/{quote(name, safe='/:')}/invocations"

    async def remote(self, text: str | None = None, **options: Any) -> Output:
        """Invoke and wait for the whole answer."""
        return output_of(await self._transport.json("POST", self._path, invocation(text, options), is_long=True))

    async def stream(self, text: str | None = None, **options: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the invocation as they come: {"delta": str} and a last one with timings and usage."""
        body = {**invocation(text, options), "stream": True}
        async for event in self._transport.events("POST", self._path, body):
            yield event

    async def spawn(
        self, text: str | None = None, *, idempotency_key: str | None = None, **options: Any
    ) -> "AsyncCall":
        """Submit as a durable job; it survives the death of any process.

        The same `idempotency_key` submits once, however often it is sent. Without one we make one, so that our own
        retries never submit twice.
        """
        headers = {"Invocation-Type": "Event", "Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        job = await self._transport.json("POST", self._path, invocation(text, options), headers)
        return AsyncCall(self._transport, job["id"])

    def map(self, texts: Iterable[str], *, concurrency: int = 32, **options: Any) -> AsyncIterator[Output]:
        """Invoke for each text, `concurrency` at once; yield the outputs in the order of the texts.

        Texts are taken as they are needed, so they may have no end: what runs, and what has ended behind a slow answer
        or before it was asked for, is never more than 16 × `concurrency`.
        """
        if concurrency < 1:
            raise InvalidRequest(f"concurrency is {concurrency}; it must be at least 1", param="concurrency")
        return in_order(lambda text: self.remote(text, **options), texts, concurrency)


class AsyncCall:
    """A job: a call that goes on without its caller."""

    def __init__(self, transport: Transport, job_id: str) -> None:
        self._transport = transport
        self.id = job_id

    def __repr__(self) -> str:
        return f"AsyncCall({self.id!r})"

    async def status(self) -> dict[str, Any]:
        """The job object as it is now."""
        job: dict[str, Any] = await self._transport.json("GET", f"/v1/jobs/{quote(self.id)}")
        return job

    async def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The job object once it has ended. Raises StartTimeout when it has not within `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            left = WAIT_SLICE_S if deadline is None else min(WAIT_SLICE_S, max(0.0, deadline - loop.time()))
            headers = {"Prefer": f"wait={max(1, round(left))}"} if left > 0 else {}
            job = await self._transport.json("GET", f"/v1/jobs/{quote(self.id)}", headers=headers)
            if job["status"] in TERMINAL:
                ended: dict[str, Any] = job
                return ended
            if deadline is not None and loop.time() >= deadline:
                raise StartTimeout(f"job {self.id} is still {job['status']} after {timeout_s} s; it goes on")

    async def result(self, timeout_s: float | None = None) -> Output:
        """Wait for the answer. Raises what the job failed with, or Cancelled."""
        job = await self.wait(timeout_s)
        if job["status"] == "succeeded":
            return output_of(job)
        if job["status"] == "canceled":
            raise Cancelled(f"job {self.id} was cancelled")
        raise error_of(job, 500) if job.get("error") else NearlineError(f"job {self.id} {job['status']}")

    async def cancel(self) -> dict[str, Any]:
        """Cancel; a job that has ended already stays as it is."""
        job: dict[str, Any] = await self._transport.json("POST", f"/v1/jobs/{quote(self.id)}/cancel")
        return job
