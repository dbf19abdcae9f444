"""Grammars of answers, checked before anything runs: what passes here, an engine can compile in bounded time."""

import asyncio
import json
from collections import OrderedDict
from typing import Any

from nearline.controller.side_process import SideProcess
from nearline.controller.text.json_schema import wrong_number
from nearline.protocol import Grammar, GrammarKind, Seconds
from nearline.protocol.errors import InvalidRequest, Overloaded

MAX_CHARS = 128 << 10
MAX_KNOWN = 256
"""Grammars that passed lately and are not checked again; mostly the same few schemas come."""
LIMIT_S: Seconds = 60.0
"""For one check, which computes for two at most; beyond, the machine is too busy."""


class GrammarChecker:
    """Tries grammars out, one at a time. Owns: a process that may die of them (grammar_worker.py)."""

    def __init__(self) -> None:
        self.process = SideProcess("nearline.controller.text.grammar_worker")
        self._lock = asyncio.Lock()
        self._known: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises InvalidRequest naming `param`; for a JSON schema the message points at the part that is wrong.

        Raises Overloaded when there is no process to try it in, or none that gets to it.
        """
        if len(grammar.source) > MAX_CHARS:
            text = f"{param} has {len(grammar.source)} characters; at most {MAX_CHARS} can be compiled"
            raise InvalidRequest(text, param=param)
        if grammar not in self._known:
            problem = await self._problem(grammar)
            if problem:
                raise InvalidRequest(f"{param}: {problem}", param=param)
            self._known[grammar] = None
        self._known.move_to_end(grammar)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _problem(self, grammar: Grammar) -> str:
        try:
            question = f"{grammar.kind.value}\n{grammar.source}".encode()
        except UnicodeEncodeError:
            return "it is not valid Unicode"
        async with self._lock:
            try:
                return (await self.process.ask(question, LIMIT_S)).decode()
            except EOFError:
                return "it takes more time, memory or stack to compile than a grammar may have; simplify it"
            except (OSError, TimeoutError) as error:
                text = "grammars cannot be checked now; try again"
                raise Overloaded(text, retry_after_s=LIMIT_S) from error

    async def close(self) -> None:
        await self.process.end()


async def schema_grammar(schema: Any, param: str) -> Grammar:
    """The grammar of a JSON schema as a client sent it. Raises InvalidRequest naming `param` and the place."""
    return Grammar(GrammarKind.JSON_SCHEMA, await asyncio.to_thread(_written, schema, param))


def _written(schema: Any, param: str) -> str:
    if problem := wrong_number(schema):
        raise InvalidRequest(f"{param}: {problem}", param=param)
    try:
        return json.dumps(schema)
    except RecursionError:
        raise InvalidRequest(f"{param}: it is nested too deeply", param=param) from None


def choice_grammar(choices: list[str]) -> Grammar:
    """One of these texts and nothing else."""
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(json.dumps(choice) for choice in choices))
