"""Grammars of answers, checked before anything runs: what passes here, an engine can compile in bounded time."""

import asyncio
import json
import signal
from functools import partial
from weakref import WeakValueDictionary

import structlog

from nearline.controller.side_process import ProcessEnded, SideProcess
from nearline.controller.text.kept import Kept
from nearline.protocol import Grammar, GrammarKind, Seconds, TenantId
from nearline.protocol.errors import InvalidRequest, Overloaded

MAX_CHARS = 128 << 10
MAX_KNOWN = 256
"""Grammars that were tried lately and are not tried again; mostly the same few schemas come."""
MAX_PROCESSES = 2
MAX_WAIT_S: Seconds = 5.0
"""For a turn; a check computes for two seconds at most."""
LIMIT_S: Seconds = 60.0
"""For one check; beyond, the machine is too busy."""
_OF_GRAMMARS = (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT)
"""How what it compiles ends a process: by computing, its stack, memory. Any other end is no fault of the client."""

log = structlog.get_logger(__name__)


class GrammarChecker:
    """Tries each grammar out once; one at a time for a tenant, so that nobody's bad ones hold up others.

    Owns: MAX_PROCESSES processes that may die of them (grammar_worker.py).
    """

    def __init__(self) -> None:
        self._idle = [SideProcess("nearline.controller.text.grammar_worker") for _ in range(MAX_PROCESSES)]
        self._places = asyncio.Semaphore(MAX_PROCESSES)
        self._turns: WeakValueDictionary[TenantId, asyncio.Lock] = WeakValueDictionary()
        self._problems: Kept[Grammar, str] = Kept(MAX_KNOWN)

    async def check(self, grammar: Grammar, param: str, tenant: TenantId) -> None:
        """Raises InvalidRequest naming `param`; for a JSON schema the message points at the part that is wrong.

        Raises Overloaded when no process gets to it, or none can be had that lives.
        """
        if len(grammar.source) > MAX_CHARS:
            text = f"{param} has {len(grammar.source)} characters; at most {MAX_CHARS} can be compiled"
            raise InvalidRequest(text, param=param)
        problem = await self._problems.get(grammar, partial(self._problem, grammar, tenant))
        if problem:
            raise InvalidRequest(f"{param}: {problem}", param=param)

    async def _problem(self, grammar: Grammar, tenant: TenantId) -> str:
        try:
            question = f"{grammar.kind.value}\n{grammar.source}".encode()
        except UnicodeEncodeError:
            return "it is not valid Unicode"
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(MAX_WAIT_S) as patience, turn, self._places:
                patience.reschedule(None)
                process = self._idle.pop()
                try:
                    return await _answer(process, question)
                finally:
                    self._idle.append(process)
        except (OSError, EOFError, TimeoutError) as error:
            raise Overloaded("grammars cannot be checked now; try again", retry_after_s=MAX_WAIT_S) from error

    async def close(self) -> None:
        await self._problems.close()
        for process in self._idle:
            await process.end()


async def _answer(process: SideProcess, question: bytes, is_second_try: bool = False) -> str:
    try:
        return (await process.ask(question, LIMIT_S)).decode()
    except ProcessEnded as ended:
        if ended.returncode in _OF_GRAMMARS:
            return "it takes more time, memory or stack to compile than a grammar may have; simplify it"
        log.warning("grammar_worker_ended", returncode=ended.returncode)
        if is_second_try:
            raise
    return await _answer(process, question, is_second_try=True)


def choice_grammar(choices: list[str]) -> Grammar:
    """One of these texts and nothing else."""
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(json.dumps(choice) for choice in choices))
