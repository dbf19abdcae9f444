"""Tasks that nobody waits for in time: what ends one is logged when it does."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

T = TypeVar("T")
log = structlog.get_logger()


def watched(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task. It must be kept by someone; its error may be read too, or never."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("a task of the agent failed", task=task.get_name(), exc_info=error)
