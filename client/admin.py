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

    async def show(self, kind: str, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = await self._transport.json("GET", f"/admin/{kind}/{quote(name, safe='/:')}")
        return shown

    async def remove(self, kind: str, name: str) -> None:
        await self._transport.json("DELETE", f"/admin/{kind}/{quote(name, safe='/:')}")

    async def is_ready(self) -> bool:
        async with self._transport.open("GET", "/health/ready") as response:
            return response.status == 200
