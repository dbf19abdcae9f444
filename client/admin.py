"""The operator's side of the SDK: what is registered and what runs."""

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from nearline.client.transport import Transport


class AsyncAdmin:
    """Registers, lists and removes models and adapters; looks at instances and nodes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def add(self, kind: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Register under /admin/{kind} (`models` or `adapters`); yield progress, then the registered object."""
        async for event in self._transport.events("POST", f"/admin/{kind}", body):
            yield event

    async def list(self, kind: str) -> list[dict[str, Any]]:
        """`kind` is models, adapters, instances, nodes or queues."""
        listed = await self._transport.json("GET", f"/admin/{kind}")
        data: list[dict[str, Any]] = listed["data"]
        return data

    async def fleet(self) -> dict[str, Any]:
        """Everything at one instant: `models`, `instances`, `queues` and `nodes`, and the server's `version`."""
        shown: dict[str, Any] = await self._transport.json("GET", "/admin/fleet")
        return shown

    async def show(self, kind: str, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = await self._transport.json("GET", f"/admin/{kind}/{quote(name, safe='/:')}")
        return shown

    async def change(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Change a model's settings (keep-alive, replicas, promise); return the model as it is then."""
        path = f"/admin/models/{quote(name, safe='/:')}"
        changed: dict[str, Any] = await self._transport.json("PATCH", path, settings)
        return changed

    async def remove(self, kind: str, name: str) -> None:
        await self._transport.json("DELETE", f"/admin/{kind}/{quote(name, safe='/:')}")

    async def verify(self, kind: str, name: str) -> AsyncIterator[dict[str, Any]]:
        """Check the bytes of a model or adapter on SSD; yield progress, then the result. Raises CheckpointCorrupt."""
        async for event in self._transport.events("POST", f"/admin/{kind}/{quote(name, safe='/:')}/verify", None):
            yield event

    async def copy(self, kind: str, name: str, node: str | None = None) -> AsyncIterator[dict[str, Any]]:
        """Copy the bytes of a model or adapter to another node; yield progress, then the result."""
        query = f"?node={quote(node, safe='')}" if node else ""
        path = f"/admin/{kind}/{quote(name, safe='/:')}/copy{query}"
        async for event in self._transport.events("POST", path, None):
            yield event

    async def profile(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Measure what a model's steps take; yield progress, then the profile. Starts the model if need be."""
        async for event in self._transport.events("POST", f"/admin/models/{quote(name, safe='/:')}/profile", None):
            yield event

    async def evict(self, name: str) -> int:
        """Give a model's DRAM back: the next start reads from SSD. Returns the bytes freed (0 while it runs)."""
        answer = await self._transport.json("POST", f"/admin/models/{quote(name, safe='/:')}/evict")
        freed: int = answer["freed_bytes"]
        return freed

    async def is_ready(self) -> bool:
        async with self._transport.open("GET", "/health/ready") as response:
            return response.status == 200
