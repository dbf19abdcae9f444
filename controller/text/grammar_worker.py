"""What is wrong with a grammar: tried out as an engine would, in a process of its own that may die of it (grammars.py).

llguidance recurses as deep as a grammar's rules do and compiles without a limit of time, so a grammar of a few
kilobytes can overflow a stack or take minutes; neither can be stopped from inside.
"""

import json
import resource
import signal
import threading
import time
from typing import Any

import llguidance

from nearline.controller.pipes import answer_all
from nearline.controller.text.json_schema import subschemas, wrong_number
from nearline.protocol import Grammar, GrammarKind
from nearline.protocol.request import MAX_LEXER_FUEL, MAX_LEXER_STATES, MAX_SYMBOLS

CPU_S = 1
"""Computing that one grammar may cost here, and up to one second more; then the kernel ends the process."""
MEMORY_BYTES = 1 << 30
STACK_BYTES = 2 << 20
"""A quarter of what an engine's threads have, so that what passes here overflows none of theirs."""
MAX_PROBES = 200
"""Subschemas tried when looking for the wrong one."""
_END = 256


class _Bytes:
    """The smallest vocabulary: what a grammar costs to compile hardly depends on the model's own."""

    eos_token_id = _END
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(_END)), b"<end>")
    special_token_ids = (_END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


_VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), slices=[])
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=MAX_LEXER_FUEL,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=MAX_SYMBOLS,
    verbose_errors=False,
)


def problem(grammar: Grammar) -> str:
    """Say in one line why no engine could follow a grammar, and for a JSON schema where; empty if it could."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return _complaint(grammar) or _trouble(grammar)
    try:
        schema = json.loads(grammar.source)
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return f"it is not JSON: {error}"
    if found := wrong_number(schema):
        return found
    complaint = _complaint(grammar)
    return f"at {_locate(schema, complaint) or '/'}: {complaint}" if complaint else _trouble(grammar)


def _complaint(grammar: Grammar) -> str:
    """What llguidance says of a grammar, in one line; empty if nothing is wrong."""
    try:
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(_source(grammar), limits=_LIMITS)
    except ValueError as error:
        is_error, messages = True, [str(error)]
    return _line(messages[0]) if is_error else ""


def _trouble(grammar: Grammar) -> str:
    """Compile a grammar and ask for its first two tokens: an expression too large shows only at the second.

    A Lark grammar may name tokens that only its model has; of the others' errors its lexer's alone count.
    """
    matcher = llguidance.LLMatcher(_VOCABULARY, _source(grammar), log_level=0, limits=_LIMITS)
    if not matcher.get_error():
        first = _lowest(matcher.compute_bitmask())
        if first is not None and not matcher.get_error():
            matcher.consume_token(first)
            if not matcher.is_stopped():
                matcher.compute_bitmask()
    error = matcher.get_error().partition("\n<")[0]
    is_told = "lexer error" in error if grammar.kind is GrammarKind.LARK else bool(error)
    return f"no answer can keep to it: {_line(error)}" if is_told else ""


def _lowest(bits: bytes) -> int | None:
    """The lowest token that a mask allows."""
    mask = int.from_bytes(bits, "little")
    return (mask & -mask).bit_length() - 1 if mask else None


def _source(grammar: Grammar) -> str:
    matcher, made = llguidance.LLMatcher, ""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        made = matcher.grammar_from_json_schema(grammar.source)
    elif grammar.kind is GrammarKind.REGEX:
        made = matcher.grammar_from_regex(grammar.source)
    else:
        made = matcher.grammar_from_lark(grammar.source)
    return made


def _line(message: str) -> str:
    return " ".join(message.split())[:500]


def _locate(schema: Any, complaint: str) -> str:
    """Point at the smallest part that alone causes the same complaint."""
    where, budget = "", MAX_PROBES
    while True:
        for key, value in subschemas(schema):
            budget -= 1
            if budget < 0:
                return where
            if _complaint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))) == complaint:
                where, schema = f"{where}/{key}", value
                break
        else:
            return where


def _answer(question: bytes) -> bytes:
    used_s = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + CPU_S + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    kind, _, source = question.decode().partition("\n")
    try:
        found = problem(Grammar(GrammarKind(kind), source))
    except MemoryError:
        found = "it takes more memory to compile than a grammar may have; simplify it"
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:  # of the library: no Exception
        found = f"it cannot be compiled: {panic}"
    return found.encode()


def main() -> None:
    """Answer every grammar on stdin (its kind, a line feed, its source) with what is wrong with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the controller's to act on
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=answer_all, args=(_answer,))
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()
