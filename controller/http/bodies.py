"""Bodies read without holding up the event loop: large ones, and those that may be, in a thread."""

import asyncio
from typing import Any

from nearline.controller.http.schemas import B, parse

INLINE_BYTES = 256 << 10
"""A body up to this size is read on the event loop, within a few milliseconds."""

Data = bytes | str | dict[str, Any]


async def read_body(cls: type[B], data: Data) -> B:
    """Read a body. An object that was read before counts as large. Raises InvalidRequest."""
    if not isinstance(data, dict) and len(data) <= INLINE_BYTES:
        return parse(cls, data)
    return await asyncio.to_thread(parse, cls, data)
