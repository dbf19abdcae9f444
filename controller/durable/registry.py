"""What is registered: models and adapters by name, durable in Redis and answered from memory."""

import difflib
import json
import re
from dataclasses import dataclass
from typing import TypeVar

from nearline.controller.durable.redis_state import State, state_errors
from nearline.controller.shown import shown
from nearline.protocol import AdapterSpec, CheckpointKind, Digest, ModelId, ModelSpec, from_plain, to_plain
from nearline.protocol.errors import InvalidRequest, ModelNotFound, NameTaken, StateUnavailable

MAX_NAME_CHARS = 200
_MAX_QUALIFIED_CHARS = 2 * MAX_NAME_CHARS + 1
_NAME = re.compile(r"\w[\w.+@=:-]*(/\w[\w.+@=:-]*)*")

Spec = TypeVar("Spec", ModelSpec, AdapterSpec)

# A controller that lost the lease must not write: its fencing number is no longer the newest.
WRITE = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[2]) else redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) end
return 1
"""


@dataclass(frozen=True, slots=True)
class Target:
    """What a name in a request means: a model, or an adapter on its model. `name` is what the client wrote."""

    name: str
    model: ModelSpec
    adapter: AdapterSpec | None = None


def _meant(name: str, names: list[str]) -> str | None:
    """Ask whether the name most like this one was meant; None if none is like it."""
    near = difflib.get_close_matches(name[:_MAX_QUALIFIED_CHARS], names, n=1)
    return f"did you mean {near[0]!r}?" if near else None


def check_name(name: str) -> None:
    """Refuse names that could leave a directory, break a URL or an index. Raises InvalidRequest."""
    is_ok = bool(_NAME.fullmatch(name)) and ".." not in name and len(name) <= MAX_NAME_CHARS
    if not is_ok or name.endswith("/invocations"):
        raise InvalidRequest(
            f"{shown(name)} cannot be a name: use letters, digits and . _ + @ = : - in parts joined by single slashes,"
            f" no '..', at most {MAX_NAME_CHARS} characters",
            param="name",
        )


class Registry:
    """All specs. Reads never wait; writes go to Redis first and then to memory, and fail when Redis does."""

    def __init__(self, state: State, fencing_token: int) -> None:
        self._state = state
        self._fencing_token = fencing_token
        self.models: dict[str, ModelSpec] = {}
        self.adapters: dict[str, AdapterSpec] = {}
        self.checkpoints: set[Digest] = set()
        """Every checkpoint that was ever imported for this registry, named by anything or not."""

    async def load(self) -> None:
        """Read everything from Redis. Raises StateUnavailable."""
        async with state_errors():
            models = await self._state.redis.hgetall(self._state.key("models"))
            adapters = await self._state.redis.hgetall(self._state.key("adapters"))
            digests = await self._state.redis.smembers(self._state.key("checkpoints"))
        self.checkpoints.update(Digest(digest) for digest in digests)
        self.models = _parse(ModelSpec, models)
        self.adapters = _parse(AdapterSpec, adapters)

    async def note_checkpoint(self, digest: Digest) -> None:
        """Remember that these bytes are ours, before any name needs them. Raises StateUnavailable, StorageFull.

        What cannot be written is known until a restart, so that the janitor finds bytes which get no name now.
        """
        self.checkpoints.add(digest)
        async with state_errors():
            await self._state.redis.sadd(self._state.key("checkpoints"), digest)

    def resolve(self, name: str) -> Target:
        """Find what `name` means: a model's id, an adapter's id, or `base:adapter`. Raises ModelNotFound."""
        if name in self.models:
            return Target(name, self.models[name])
        adapter = self.adapters.get(name) or self._qualified(name)
        if adapter is None or adapter.base_id not in self.models:
            hint = _meant(name, [*self.models, *self.adapters]) or "`nearline model list` shows what may be called"
            raise ModelNotFound(f"no model or adapter is named {shown(name)}; {hint}", param="model")
        return Target(name, self.models[adapter.base_id], adapter)

    def missing(
        self, kind: CheckpointKind, name: str, param: str = "name", otherwise: str | None = None
    ) -> ModelNotFound:
        """The error for a name that no model has, or no adapter: what it names instead, what was meant, or what else to
        do."""
        own, others = list(self.models), list(self.adapters)
        what = "an adapter"
        if kind is CheckpointKind.ADAPTER:
            own, others, what = others, own, "a model"
        hint = f"it is {what}" if name in others else _meant(name, own) or otherwise
        return ModelNotFound(
            f"no {kind.value} is named {shown(name)}; {hint or f'`nearline {kind.value} list` shows all'}", param=param
        )

    def _qualified(self, name: str) -> AdapterSpec | None:
        """Both parts may hold colons themselves, so each colon is tried."""
        if len(name) > _MAX_QUALIFIED_CHARS:
            return None
        for at in (i for i, char in enumerate(name) if char == ":"):
            adapter = self.adapters.get(name[at + 1 :])
            if adapter is not None and adapter.base_id == name[:at]:
                return adapter
        return None

    def check_free(self, name: str, base_id: ModelId | None = None) -> None:
        """Check the name of something new, an adapter if it has a base: no name that was called before may come to mean
        something else. Raises InvalidRequest for a bad name, NameTaken for one in use."""
        check_name(name)
        if name in self.models or name in self.adapters:
            cure = "remove it first, choose another name, or have one of its kind take its place (`replace`)"
            raise NameTaken(f"{name!r} is registered already; {cure}", param="name")
        if (meant := self._qualified(name)) is not None:
            found = f"adapter {meant.adapter_id!r} on {meant.base_id!r}"
            raise NameTaken(f"{name!r} means {found} already; choose another name", param="name")
        qualified = f"{base_id}:{name}"
        if base_id is not None and (qualified in self.models or qualified in self.adapters):
            raise NameTaken(f"{qualified!r} is registered already, and would mean this adapter, too", param="name")

    def adapters_of(self, model_id: ModelId) -> list[AdapterSpec]:
        return [adapter for adapter in self.adapters.values() if adapter.base_id == model_id]

    async def put_model(self, spec: ModelSpec) -> None:
        await self._write("models", spec.model_id, json.dumps(to_plain(spec)))
        self.models[spec.model_id] = spec

    async def put_adapter(self, spec: AdapterSpec) -> None:
        await self._write("adapters", spec.adapter_id, json.dumps(to_plain(spec)))
        self.adapters[spec.adapter_id] = spec

    async def remove_model(self, model_id: ModelId) -> ModelSpec:
        """Forget a model. Raises ModelNotFound, or InvalidRequest while adapters stand on it."""
        if model_id not in self.models:
            raise self.missing(CheckpointKind.MODEL, model_id)
        names = sorted(adapter.adapter_id for adapter in self.adapters_of(model_id))
        if names:
            raise InvalidRequest(f"adapters stand on {model_id!r}: remove {', '.join(names)} first", param="name")
        await self._write("models", model_id, "")
        return self.models.pop(model_id)

    async def remove_adapter(self, adapter_id: ModelId) -> AdapterSpec:
        """Forget an adapter. Raises ModelNotFound."""
        if adapter_id not in self.adapters:
            raise self.missing(CheckpointKind.ADAPTER, adapter_id)
        await self._write("adapters", adapter_id, "")
        return self.adapters.pop(adapter_id)

    async def _write(self, kind: str, name: str, value: str) -> None:
        keys = [self._state.key(kind), self._state.key("fence")]
        if not await self._state.run(WRITE, keys, [self._fencing_token, name, value]):
            raise StateUnavailable("another controller has taken over; ask it instead", retry_after_s=1.0)
        await self._state.confirm()


def _parse(cls: type[Spec], plain: dict[str, str]) -> dict[str, Spec]:
    return {name: from_plain(cls, json.loads(text)) for name, text in sorted(plain.items())}
