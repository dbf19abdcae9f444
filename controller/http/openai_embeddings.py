"""POST /v1/embeddings: texts become unit vectors, many at a time. Source: OpenAI's API reference."""

import asyncio
import base64
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from nearline.controller.durable.registry import Target
from nearline.controller.durable.token_limits import Reservation
from nearline.controller.http.answers import OnFirstToken
from nearline.controller.http.bodies import Data, read_body
from nearline.controller.http.calls import load, make_call, most_tokens, text_prompt
from nearline.controller.http.door import Caller, Door, caller_of, door_of
from nearline.controller.http.generation import Call, Generation
from nearline.controller.http.schemas import EmbeddingBody, PromiseFields, SamplingBody
from nearline.protocol import Pooling, Usage
from nearline.protocol.errors import Cancelled, ErrorInfo, InvalidRequest, NearlineError

Vector = NDArray[np.float32]

MAX_INPUTS = 2048
MAX_IN_FLIGHT = 64
"""Inputs of one request that run at once; the others wait their turn here, so that they crowd nobody out."""


class Embedding:
    """One embedding request, ready to run."""

    def __init__(
        self, door: Door, target: Target, body: EmbeddingBody, calls: Sequence[Call], reservation: Reservation
    ) -> None:
        self._runtime = door.runtime
        self._metrics = door.metrics.of(target.model.model_id)
        self._body = body
        self._calls = calls
        self._reservation = reservation
        self._num_used = 0
        self._num_cached = 0
        self._gate = asyncio.Semaphore(MAX_IN_FLIGHT)

    @classmethod
    async def open(cls, door: Door, caller: Caller, data: Data) -> "Embedding":
        """Validate and tokenise everything. Raises NearlineError; nothing runs before `result`."""
        body = await read_body(EmbeddingBody, data)
        target, text = await load(door, body.model)
        promise = {name: getattr(body, name) for name in PromiseFields.model_fields}
        sampling = SamplingBody(max_tokens=0, **promise)
        pooling = target.model.pooling if body.pooling is None else Pooling(body.pooling)
        calls = []
        for index, one in enumerate(inputs_of(body)):
            try:
                if not one:
                    raise InvalidRequest("it is empty; an embedding needs at least one token")
                call = make_call(caller, target, text, await text_prompt(target, text, one), sampling, 0)
            except InvalidRequest as error:
                raise type(error)(f"input {index}: {error.message}", param="input") from None
            calls.append(replace(call, request=replace(call.request, pooling=pooling)))
            await asyncio.sleep(0)  # thousands of texts must not hold up the others' streams
        reservation = await door.limits.reserve(door.state, caller.tenant, most_tokens(calls))
        return cls(door, target, body, calls, reservation)

    async def result(self, on_first_token: OnFirstToken | None = None) -> dict[str, Any]:
        """Run all inputs. The first that fails cancels the others."""
        started_at = time.monotonic()
        try:
            found = await self._run()
            vectors = [self._shaped(vector) for vector in found]
        except asyncio.CancelledError:
            self._metrics.failed(Cancelled("").code)
            raise
        except Exception as error:
            self._metrics.failed(ErrorInfo.of(error).code)
            raise
        finally:
            self._reservation.settle(self._num_used)
        if on_first_token is not None:
            await on_first_token()
        num_prompt = sum(len(call.request.prompt_token_ids) for call in self._calls)
        usage = Usage(num_prompt, 0, self._num_cached)
        self._metrics.finished(time.monotonic() - started_at, usage, ["stop"])
        return {
            "object": "list",
            "model": self._body.model,
            "data": [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)],
            "usage": {"prompt_tokens": num_prompt, "total_tokens": num_prompt},
        }

    async def _run(self) -> list[Vector]:
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._vector(call)) for call in self._calls]
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        return [task.result() for task in running]

    async def _vector(self, call: Call) -> Vector:
        async with self._gate:
            generation = Generation(self._runtime, call)
            self._num_used += generation.usage.num_prompt_tokens
            async for _ in generation.deltas():
                pass
        self._num_cached += generation.usage.num_cached_tokens
        if generation.embedding is None:
            raise NearlineError("the instance ended an embedding without a vector; see the node agent's log")
        return np.frombuffer(generation.embedding, "<f4")

    def _shaped(self, vector: Vector) -> str | list[float]:
        """Cut to `dimensions`, make it of length one, and write it as the client asked."""
        size = self._body.dimensions or len(vector)
        if size > len(vector):
            raise InvalidRequest(f"this model's embeddings have {len(vector)} dimensions", param="dimensions")
        exact = vector[:size].astype(np.float64)
        unit = (exact / max(float(np.linalg.norm(exact)), 1e-12)).astype("<f4")
        if self._body.encoding_format == "base64":
            return base64.b64encode(unit.tobytes()).decode()
        floats: list[float] = unit.tolist()
        return floats


def inputs_of(body: EmbeddingBody) -> list[str | list[int]]:
    """The inputs one by one. Raises InvalidRequest when there are none or too many."""
    given = body.input
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    found: list[str | list[int]] = [ids] if ids else [item for item in given if not isinstance(item, int)]
    if not found:
        raise InvalidRequest("input is an empty list", param="input")
    if len(found) > MAX_INPUTS:
        raise InvalidRequest(f"{len(found)} inputs are more than {MAX_INPUTS}; send several requests", param="input")
    return found


async def embeddings(request: web.Request) -> web.StreamResponse:
    embedding = await Embedding.open(door_of(request), caller_of(request), await request.read())
    return web.json_response(await embedding.result())
