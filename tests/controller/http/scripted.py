"""A runtime that says what a test tells it to, one token per update, behind the same protocol as the live one."""

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nearline.controller.handle import RequestTimings
from nearline.controller.http.ports import Snapshot
from nearline.protocol import (
    AdapterSpec,
    CheckpointInfo,
    CheckpointKind,
    Digest,
    FinishReason,
    ModelId,
    ModelSpec,
    Pooling,
    Request,
    SequenceTimings,
    SequenceUpdate,
    TaskId,
    TokenLogprob,
)
from nearline.protocol.errors import NearlineError
from nearline.protocol.frames import ImportFinished, TaskProgress

EOS = 258
Script = Callable[[Request], Sequence[int]]


def text_ids(text: str, files: dict[str, bytes]) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_str(files["tokenizer.json"].decode()).encode(text, add_special_tokens=False).ids
    return ids


class ScriptedHandle:
    """Plays a script. `runtime.gate` holds it before its first token, `runtime.break_at` fails it at a token."""

    def __init__(self, runtime: "ScriptedRuntime", request: Request) -> None:
        self.runtime = runtime
        self.request = request
        self.is_cancelled = False
        self.num_sent = 0
        self.timings: RequestTimings | None = RequestTimings(is_cold=False, queued_s=0.001, num_attempts=1)

    async def __aiter__(self) -> Any:
        runtime, sampling = self.runtime, self.request.sampling
        await runtime.gate.wait()
        if self.request.pooling is not None or sampling.max_tokens == 0:
            await asyncio.sleep(runtime.step_s)
            if runtime.break_at is not None:
                raise runtime.break_at[1]
            yield self._reading()
            return
        ids = list(runtime.script(self.request))
        for index, token_id in enumerate(ids[: sampling.max_tokens]):
            if runtime.break_at is not None and index == runtime.break_at[0]:
                error = runtime.break_at[1]
                if runtime.breaks_once:
                    runtime.break_at = None
                raise error
            await asyncio.sleep(runtime.step_s)
            is_eos = token_id == EOS and not sampling.ignore_eos
            is_last = index + 1 == min(len(ids), sampling.max_tokens)
            reason = FinishReason.STOP if is_eos else FinishReason.LENGTH if is_last else None
            self.num_sent += 1
            yield self._update(token_id, reason, is_first=index == 0)
            if reason is not None:
                return

    def _update(self, token_id: int, reason: FinishReason | None, is_first: bool) -> SequenceUpdate:
        wanted = self.request.sampling.logprobs
        top = tuple((token_id + i, -0.5 - i) for i in range(wanted or 0))
        logprobs = None if wanted is None else (TokenLogprob(-0.5, top),)
        timings = SequenceTimings(0.001, 0.0, 0.002, 3) if is_first else None
        read = self._prompt_logprobs() if is_first else None
        return SequenceUpdate(
            self.request.request_id, 1, (token_id,), reason, logprobs, timings, prompt_logprobs=read
        )  # fmt: skip

    def _reading(self) -> SequenceUpdate:
        """What a prompt that is only read gives: log-probabilities, or a vector (its length, its last token …)."""
        if self.request.pooling is None:
            scored = self._prompt_logprobs()
            return SequenceUpdate(self.request.request_id, 1, (), FinishReason.LENGTH, prompt_logprobs=scored)
        ids = self.request.prompt_token_ids
        vector = struct.pack("<4f", len(ids), ids[-1], 3.0 if self.request.pooling is Pooling.MEAN else 4.0, 0.5)
        return SequenceUpdate(self.request.request_id, 1, (), FinishReason.STOP, embedding=vector)

    def _prompt_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The log-probability of the prompt's token i is -i, that of its first alternative (id + 1) -i - 1."""
        wanted, ids = self.request.sampling.prompt_logprobs, self.request.prompt_token_ids
        if wanted is None:
            return None
        return tuple(
            TokenLogprob(-float(i), tuple((ids[i] + j, -float(i) - j) for j in range(wanted)))
            for i in range(1, len(ids))
        )

    def cancel(self) -> None:
        self.is_cancelled = True


class ScriptedRuntime:
    """Every request gets `script(request)` as its tokens."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.script: Script = lambda request: [*text_ids("Hello, world!", files), EOS]
        self.gate = asyncio.Event()
        self.gate.set()
        self.step_s = 0.0
        self.break_at: tuple[int, NearlineError] | None = None
        self.breaks_once = False
        self.refusal: NearlineError | None = None
        self.handles: list[ScriptedHandle] = []
        self.imports: dict[str, CheckpointInfo | NearlineError] = {}
        self.import_gate = asyncio.Event()
        self.import_gate.set()
        self.begun_imports: list[str] = []
        self.closed_imports: list[str] = []
        self.num_registering = 0
        self.models: dict[str, ModelSpec] = {}
        self.adapters: dict[str, AdapterSpec] = {}
        node = {"id": "node-1", "is_connected": True, "residency": {}, "profiles": {}}
        self.fleet: dict[str, list[dict[str, Any]]] = {"nodes": [node], "instances": [], "models": [], "queues": []}

    def open(self, request: Request) -> ScriptedHandle:
        if self.refusal is not None:
            raise self.refusal
        self.handles.append(ScriptedHandle(self, request))
        return self.handles[-1]

    def say(self, text: str, *more: int) -> None:
        """Answer every request with this text and these ids."""
        self.script = lambda request: [*text_ids(text, self.files), *more]

    def add_model(self, spec: ModelSpec) -> None:
        self.models[spec.model_id] = spec

    def remove_model(self, model_id: ModelId) -> None:
        self.models.pop(model_id, None)

    def add_adapter(self, spec: AdapterSpec) -> None:
        self.adapters[spec.adapter_id] = spec

    def remove_adapter(self, adapter_id: ModelId) -> None:
        self.adapters.pop(adapter_id, None)

    def registry_loaded(self, own: Any) -> None: ...

    @contextmanager
    def registering(self) -> Iterator[None]:
        self.num_registering += 1
        yield
        self.num_registering -= 1

    async def import_checkpoint(
        self, kind: CheckpointKind, source: str, base_digest: Digest | None = None
    ) -> AsyncGenerator[TaskProgress | ImportFinished, None]:
        self.begun_imports.append(source)
        try:
            yield TaskProgress(TaskId("t"), "convert", 1, 2)
            await self.import_gate.wait()
            found = self.imports[source]
            if isinstance(found, NearlineError):
                raise found
            yield ImportFinished(TaskId("t"), found)
        finally:
            self.closed_imports.append(source)

    async def fetch_file(self, digest: Digest, name: str) -> bytes:
        return self.files[name]

    def snapshot(self) -> Snapshot:
        return self.fleet
