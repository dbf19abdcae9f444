"""Registration: an import on a node becomes a name people can call, or nothing at all."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from nearline.controller.durable.registry import check_name
from nearline.controller.http.door import Door
from nearline.controller.http.schemas import AdapterBody, ModelBody, ModelPatch
from nearline.controller.shown import shown
from nearline.protocol import (
    AdapterSpec,
    CheckpointInfo,
    CheckpointKind,
    ModelId,
    ModelSpec,
    Pooling,
    SloClass,
    to_plain,
)
from nearline.protocol.errors import (
    AdapterMismatch,
    Cancelled,
    InvalidRequest,
    ModelNotFound,
    NameTaken,
    NearlineError,
)
from nearline.protocol.frames import ImportFinished, TaskProgress

log = structlog.get_logger(__name__)

Event = dict[str, Any]


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A registration until its name can be called. Once `is_publishing` it is completed; before, a removal ends it."""

    kind: CheckpointKind
    is_publishing: bool = False
    removed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, work: Coroutine[Any, Any, Any], name: str) -> Any:
        """Await this unless the name is removed meanwhile: then the work is cancelled. Raises Cancelled."""
        doing, removing = asyncio.create_task(work), asyncio.create_task(self.removed.wait())
        try:
            await asyncio.wait({doing, removing}, return_when=asyncio.FIRST_COMPLETED)
            if self.removed.is_set():
                raise Cancelled(
                    f"{shown(name)} was removed while it was being registered; add it again if it is wanted"
                )
            return await doing
        finally:
            for task in (doing, removing):
                task.cancel()
            await asyncio.gather(doing, removing, return_exceptions=True)


class Registrar:
    """Registers models and adapters. Owns: the names under way, so that two imports never race for one.

    A change that has begun in Redis is completed in the fleet although its caller leaves.
    """

    def __init__(self) -> None:
        self._names: dict[str, _UnderWay] = {}
        self._changes: set[asyncio.Task[Event]] = set()
        self._turn = asyncio.Lock()

    def check(self, door: Door, body: ModelBody | AdapterBody) -> None:
        """Refuse before anything is read. Raises InvalidRequest, NameTaken, ModelNotFound."""
        _check_name(door, body)
        if body.name in self._names:
            raise NameTaken(f"{body.name!r} is being registered right now", param="name")
        if isinstance(body, AdapterBody):
            base_of(door, body)

    async def events(self, door: Door, body: ModelBody | AdapterBody) -> AsyncGenerator[Event, None]:
        """Yield progress, then the registered object: it may be called from then on. Leaving early cancels, and so does
        a removal of the name."""
        self.check(door, body)
        if isinstance(body, ModelBody):
            kind, base_digest = CheckpointKind.MODEL, None
        else:
            kind, base_digest = CheckpointKind.ADAPTER, base_of(door, body).checkpoint.digest
        under_way = self._names[body.name] = _UnderWay(kind)
        keeping = ExitStack()
        keeping.enter_context(door.runtime.registering())
        try:
            checkpoint = None
            async with aclosing(door.runtime.import_checkpoint(kind, _source(body), base_digest)) as updates:
                while (update := await under_way.wait(_next(updates), body.name)) is not None:
                    if isinstance(update, ImportFinished):
                        checkpoint = update.checkpoint
                        break
                    yield {"phase": update.phase, "done_bytes": update.done_bytes, "total_bytes": update.total_bytes}
            if checkpoint is None:
                raise NearlineError("the import ended without a checkpoint; see the node agent's log")
            can_chat = await under_way.wait(_prepare(door, body, checkpoint), body.name)
            under_way.is_publishing = True
            if isinstance(body, ModelBody):
                published = await self._complete(_keeping_bytes(door, _publish_model(door, body, checkpoint)))
            else:
                published = await self._complete(_keeping_bytes(door, _publish_adapter(door, body, checkpoint)))
            yield {**published, "has_chat_template": can_chat}
        finally:
            keeping.close()
            if self._names.get(body.name) is under_way:
                del self._names[body.name]

    async def change_model(self, door: Door, name: ModelId, body: ModelPatch) -> Event:
        """Raises ModelNotFound, or InvalidRequest for limits that contradict each other."""
        return await self._complete(_change_model(door, name, body))

    async def remove_model(self, door: Door, name: ModelId) -> Event:
        """Raises ModelNotFound, or InvalidRequest while adapters stand on it."""
        return await self._remove(name, CheckpointKind.MODEL, lambda: _remove_model(door, name))

    async def remove_adapter(self, door: Door, name: ModelId) -> Event:
        """Raises ModelNotFound."""
        return await self._remove(name, CheckpointKind.ADAPTER, lambda: _remove_adapter(door, name))

    async def _remove(
        self, name: ModelId, kind: CheckpointKind, remove: Callable[[], Coroutine[Any, Any, Event]]
    ) -> Event:
        """Take a name away, and with it a registration that would bring it back."""
        was_under_way = self._is_under_way(name, kind)
        try:
            removed = await self._complete(remove())
        except ModelNotFound:
            if self._cancel(name, kind):
                return {"id": name, "object": kind.value, "deleted": True}
            if not was_under_way:
                raise
            return await self._complete(remove())  # it was registered since
        self._cancel(name, kind)
        return removed

    def _is_under_way(self, name: str, kind: CheckpointKind) -> bool:
        return name in self._names and self._names[name].kind is kind

    def _cancel(self, name: str, kind: CheckpointKind) -> bool:
        """End a registration that has not begun to publish its name, which is free at once. False: there is none."""
        if not self._is_under_way(name, kind) or self._names[name].is_publishing:
            return False
        self._names.pop(name).removed.set()
        log.info("registration_cancelled", name=name, kind=kind.value)
        return True

    async def _complete(self, change: Coroutine[Any, Any, Event]) -> Event:
        task = asyncio.create_task(self._in_turn(change))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:  # its caller has left: its failure would be told to nobody
            task.add_done_callback(_log_failure)
            raise

    async def _in_turn(self, change: Coroutine[Any, Any, Event]) -> Event:
        """One change after the other: a setting changed while its model is removed must not bring it back."""
        async with self._turn:
            return await change


async def _next(
    updates: AsyncGenerator[TaskProgress | ImportFinished, None],
) -> TaskProgress | ImportFinished | None:
    """The next word of an import; None: it has said its last."""
    return await anext(updates, None)


async def _prepare(door: Door, body: ModelBody | AdapterBody, checkpoint: CheckpointInfo) -> bool:
    """Have ready what a name needs before it can be called. Returns whether it has a chat template, or its base has."""
    await door.registry.note_checkpoint(checkpoint.digest)
    await door.texts.preload(checkpoint)
    if isinstance(body, ModelBody):
        return (await door.texts.get(checkpoint)).has_chat_template
    return (await door.texts.get(base_of(door, body).checkpoint, checkpoint)).has_chat_template


def _log_failure(task: asyncio.Task[Event]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.warning("a change failed after its caller had left", error=repr(error))


async def _keeping_bytes(door: Door, change: Coroutine[Any, Any, Event]) -> Event:
    """Complete a change whose caller may leave, and with it the hold that began with the import."""
    with door.runtime.registering():
        return await change


def _check_name(door: Door, body: ModelBody | AdapterBody) -> None:
    """Raises InvalidRequest, NameTaken."""
    known = door.registry.models if isinstance(body, ModelBody) else door.registry.adapters
    if body.replace and body.name in known:
        check_name(body.name)
    else:
        door.registry.check_free(body.name, ModelId(body.base) if isinstance(body, AdapterBody) else None)


def base_of(door: Door, body: AdapterBody) -> ModelSpec:
    """Raises ModelNotFound."""
    base = door.registry.models.get(body.base)
    if base is None:
        otherwise = "add the base of this adapter first"
        raise door.registry.missing(CheckpointKind.MODEL, body.base, "base", otherwise)
    return base


def _source(body: ModelBody | AdapterBody) -> str:
    """Give the importer's name of a source: with its format in front, if it is to be quantised."""
    wanted = body.quantize if isinstance(body, ModelBody) else None
    return f"{wanted}:{body.source}" if wanted else body.source


async def _remove_model(door: Door, name: ModelId) -> Event:
    await door.registry.remove_model(name)
    door.runtime.remove_model(name)
    door.metrics.forget(name)
    log.info("model_removed", model=name)
    return {"id": name, "object": "model", "deleted": True}


async def _remove_adapter(door: Door, name: ModelId) -> Event:
    await door.registry.remove_adapter(name)
    door.runtime.remove_adapter(name)
    log.info("adapter_removed", adapter=name)
    return {"id": name, "object": "adapter", "deleted": True}


async def _publish_model(door: Door, body: ModelBody, found: CheckpointInfo) -> Event:
    _check_name(door, body)  # another name may have been registered while the import ran
    older = door.registry.models.get(body.name)
    if older is not None and older.checkpoint.digest != found.digest and door.registry.adapters_of(older.model_id):
        raise AdapterMismatch(f"{body.name!r} has adapters made for its present weights; remove them first")
    settings = changes(body, frozenset(ModelPatch.model_fields))
    spec = changed(ModelSpec(ModelId(body.name), found, time.time()), settings)
    await door.registry.put_model(spec)
    door.runtime.add_model(spec)
    log.info("model_registered", model=body.name, digest=found.digest, num_bytes=found.num_bytes)
    return model_object(spec)


async def _change_model(door: Door, name: ModelId, body: ModelPatch) -> Event:
    old = door.registry.models.get(name)
    if old is None:
        raise door.registry.missing(CheckpointKind.MODEL, name)
    spec = changed(old, changes(body, frozenset(body.model_fields_set)))
    await door.registry.put_model(spec)
    door.runtime.add_model(spec)
    log.info("model_changed", model=name, fields=sorted(body.model_fields_set))
    return model_object(spec)


def changes(body: ModelBody | ModelPatch, names: frozenset[str]) -> dict[str, Any]:
    """Settings of a model as a body gives them, under their names in ModelSpec; of its promise only what is named."""
    plain = {name: getattr(body, name) for name in sorted(names)}
    promise: dict[str, Any] = {}
    if "slo" in plain:
        promise["slo_class"] = SloClass(plain.pop("slo") or SloClass.INTERACTIVE)
    for name in ("ttft", "tpot", "deadline"):
        if f"{name}_ms" in plain:
            span_ms = plain.pop(f"{name}_ms")
            promise[f"{name}_s"] = None if span_ms is None else span_ms / 1e3
    if "pooling" in plain:
        plain["pooling"] = Pooling(plain["pooling"])
    return {**plain, "slo": promise}


def changed(spec: ModelSpec, settings: dict[str, Any]) -> ModelSpec:
    """Put settings into a spec. Raises InvalidRequest for limits that contradict each other."""
    spec = replace(spec, **{**settings, "slo": replace(spec.slo, **settings["slo"])})
    check_limits(spec)
    return spec


def check_limits(limits: ModelBody | ModelSpec) -> None:
    """Raises InvalidRequest for limits that contradict each other."""
    if limits.min_replicas > limits.max_replicas:
        raise InvalidRequest(
            f"min_replicas {limits.min_replicas} is more than max_replicas {limits.max_replicas}; raise that, too",
            param="min_replicas",
        )
    least_s = limits.keep_alive_min_s
    if least_s is not None and 0 <= limits.keep_alive_s < least_s:
        raise InvalidRequest(
            f"keep_alive_min_s {least_s:g} is more than keep_alive_s {limits.keep_alive_s:g}", param="keep_alive_min_s"
        )


async def _publish_adapter(door: Door, body: AdapterBody, found: CheckpointInfo) -> Event:
    base = base_of(door, body)  # it may have been removed while the import ran
    _check_name(door, body)
    if found.base_digest not in (None, base.checkpoint.digest):
        raise AdapterMismatch(f"{base.model_id!r} was replaced during the import; register the adapter again")
    spec = AdapterSpec(ModelId(body.name), base.model_id, found, time.time())
    await door.registry.put_adapter(spec)
    door.runtime.add_adapter(spec)
    log.info("adapter_registered", adapter=body.name, base=base.model_id, digest=found.digest)
    return adapter_object(spec)


def model_object(spec: ModelSpec) -> dict[str, Any]:
    """A registered model as operators see it."""
    return {
        "id": spec.model_id,
        "object": "model",
        **_checkpoint_fields(spec.checkpoint),
        "max_context_tokens": spec.checkpoint.max_context_tokens,
        "vocab_size": spec.checkpoint.vocab_size,
        "quantization": spec.checkpoint.quantization or None,
        "quantization_error": spec.checkpoint.quantization_error,
        "created_at": spec.created_at,
        "keep_alive_s": spec.keep_alive_s,
        "keep_alive_min_s": spec.keep_alive_min_s,
        "min_replicas": spec.min_replicas,
        "max_replicas": spec.max_replicas,
        "pooling": spec.pooling.value,
        "slo": to_plain(spec.slo),
    }


def adapter_object(spec: AdapterSpec) -> dict[str, Any]:
    """A registered adapter as operators see it."""
    return {
        "id": spec.adapter_id,
        "object": "adapter",
        "base": spec.base_id,
        **_checkpoint_fields(spec.checkpoint),
        "rank": spec.checkpoint.rank,
        "created_at": spec.created_at,
    }


def _checkpoint_fields(checkpoint: CheckpointInfo) -> dict[str, Any]:
    return {
        "digest": checkpoint.digest,
        "source": checkpoint.source,
        "architecture": checkpoint.architecture,
        "dtype": checkpoint.dtype,
        "num_bytes": checkpoint.num_bytes,
    }
