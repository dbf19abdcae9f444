"""The solver beside the core: plans go to a process of its own and come back as events, or not at all."""

import asyncio
from collections.abc import Callable

import structlog

from nearline.controller.actions import SolvePlan
from nearline.controller.events import Event, PlanSolved
from nearline.controller.side_process import SideProcess
from nearline.protocol import MessageCodec, Seconds, encode

GRACE_S: Seconds = 10.0
"""Beyond its time limit, for the process to start and to load its libraries."""
_ANSWERS = MessageCodec(Event)
log = structlog.get_logger(__name__)


class PlanSolver:
    """Solves one plan after the other; of those asked meanwhile only the newest. Owns: its process.

    `post` hears every answer, on the event loop. A process that fails or exceeds its time is ended, and its plan gets
    no answer: the core has one already.
    """

    def __init__(self, post: Callable[[PlanSolved], None]) -> None:
        self._post = post
        self._newest: SolvePlan | None = None
        self._has_news = asyncio.Event()
        self.process = SideProcess("nearline.controller.solver")
        self._task: asyncio.Task[None] | None = None
        self.num_failures = 0

    def ask(self, wish: SolvePlan) -> None:
        """Ask for a better plan; returns at once."""
        self._newest = wish
        self._has_news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="plan solver")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.process.end()

    async def _work(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            wish, self._newest = self._newest, None
            if wish is None:
                continue
            try:
                answer = await self._solve(wish)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self.num_failures += 1
                log.warning("no plan from the solver", version=wish.version, error=repr(error))
                await self.process.end()
                continue
            self._post(answer)

    async def _solve(self, wish: SolvePlan) -> PlanSolved:
        answer = _ANSWERS.decode(await self.process.ask(encode(wish), wish.time_limit_s + GRACE_S))
        if not isinstance(answer, PlanSolved):
            raise ValueError(f"the solver answered with {type(answer).__name__}")
        return answer
