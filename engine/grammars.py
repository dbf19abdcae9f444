"""Grammars of requests as masks over the vocabulary, by llguidance. A mask depends on the sequence's tokens alone.

llguidance is optional here: an engine without it refuses requests that bring a grammar, and serves all others.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from nearline.engine.sequence import Sequence
from nearline.protocol import Grammar, GrammarKind, Seconds
from nearline.protocol.errors import Fault, InvalidRequest, UnsupportedCheckpoint
from nearline.protocol.request import MAX_LEXER_FUEL, MAX_LEXER_STATES, MAX_SYMBOLS

llguidance: Any
try:
    llguidance = import_module("llguidance")
except ImportError:
    llguidance = None

Mask = NDArray[np.bool_]
P = ParamSpec("P")
R = TypeVar("R")

WHITESPACE = r"[ \n\r\t]{1,40}"
"""Between JSON's tokens. Without a limit a model that likes line feeds writes nothing else until max_tokens."""
MAX_COMPILED = 64
BREATH_S: Seconds = 0.05
"""Between the two parts of building a vocabulary table, which hold the interpreter: steps run then."""


def _contained(method: Callable[P, R]) -> Callable[P, R]:
    """Turn a panic of the library, which is no Exception, into the error of the request that caused it."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as panic:
            raise InvalidRequest(f"llguidance failed on this grammar: {panic}", param="grammar") from None

    return call


@dataclass(slots=True)
class _Progress:
    """A sequence's matcher and how many generated tokens it has seen."""

    matcher: Any
    num_seen: int = 0


class Grammars:
    """Masks for one bound model. `tokenizer` is its tokenizer.json, read by `prepare` or when the first grammar comes.

    `prepare` and `compile` may run in any thread, the rest in one.
    Owns: the vocabulary table and MAX_COMPILED compiled grammars.
    """

    def __init__(self, tokenizer: Path | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._path, self._vocab_size, self._eos = tokenizer, vocab_size, eos_token_ids
        self._table: Any = None
        self._is_unprepared = True
        self._compiled: dict[Grammar, Any] = {}
        self._lock = threading.Lock()
        self._progress: WeakKeyDictionary[Sequence, _Progress] = WeakKeyDictionary()

    @property
    def is_unprepared(self) -> bool:
        """Whether `prepare` has not been called yet and could do something."""
        return self._is_unprepared and llguidance is not None and self._path is not None and self._path.exists()

    @_contained
    def prepare(self) -> None:
        """Read the vocabulary ahead of the first grammar. Raises UnsupportedCheckpoint, as `compile` will again."""
        self._is_unprepared = False
        with self._lock:
            self._vocabulary()

    def has(self, grammar: Grammar) -> bool:
        """Say whether a sequence of this grammar can start without compiling anything."""
        return grammar in self._compiled

    @_contained
    def compile(self, grammar: Grammar) -> Any:
        """Return a matcher that has seen nothing. What is compiled already waits for no other grammar.

        Raises InvalidRequest for a grammar that cannot be, Fault without llguidance, UnsupportedCheckpoint without
        a tokenizer.json that it can read.
        """
        matcher = self._compiled.get(grammar)
        if matcher is None:
            with self._lock:
                matcher = self._compiled.get(grammar)
                if matcher is None:
                    matcher = self._compiled[grammar] = self._compile(grammar)
                while len(self._compiled) > MAX_COMPILED:
                    oldest, *_ = self._compiled
                    self._compiled.pop(oldest, None)  # the thread of steps may have dropped it meanwhile
        return matcher

    @_contained
    def allowed(self, sequence: Sequence, position: int) -> Mask:
        """Say which tokens may stand at `position`. Shapes: [V]. Raises InvalidRequest when the grammar gives up."""
        progress = self._at(sequence, position)
        bits = np.frombuffer(progress.matcher.compute_bitmask(), dtype=np.uint8)
        self._check(sequence, progress, f"after {progress.num_seen} tokens")
        mask = np.unpackbits(bits, count=min(self._vocab_size, 8 * len(bits)), bitorder="little").astype(np.bool_)
        return np.pad(mask, (0, self._vocab_size - len(mask)))

    @_contained
    def completes(self, sequence: Sequence, token_id: int) -> bool:
        """Take in the token chosen for the position just asked for; say whether nothing may follow it."""
        progress = self._progress[sequence]
        progress.matcher.consume_token(token_id)
        progress.num_seen += 1
        self._check(sequence, progress, f"at token {progress.num_seen}")
        return bool(progress.matcher.is_stopped())

    def _at(self, sequence: Sequence, position: int) -> _Progress:
        num_generated = position - sequence.num_prompt
        progress = self._progress.get(sequence)
        if progress is None or progress.num_seen > num_generated:  # a step that failed is run again
            grammar = sequence.request.sampling.grammar
            assert grammar is not None
            progress = self._progress[sequence] = _Progress(self.compile(grammar).deep_copy())
        tokens = sequence.token_ids[sequence.num_prompt + progress.num_seen : position]
        if tokens:
            progress.matcher.consume_tokens(tokens)
            progress.num_seen = num_generated
            self._check(sequence, progress, f"after {num_generated} tokens")
        return progress

    def _check(self, sequence: Sequence, progress: _Progress, where: str) -> None:
        """Raise InvalidRequest if the matcher gave up, and let go of what the grammar's lexer made until then."""
        try:
            _raise_if_broken(progress.matcher, where)
        except InvalidRequest:
            grammar = sequence.request.sampling.grammar
            if grammar is not None:
                self._compiled.pop(grammar, None)
            raise

    def _compile(self, grammar: Grammar) -> Any:
        table = self._vocabulary()
        matcher = llguidance.LLMatcher(table, _source(grammar), log_level=0, limits=_limits())
        _raise_if_broken(matcher, "")
        matcher.compute_bitmask()  # the dearest: its copies find the lexer's first states made, and no step waits
        _raise_if_broken(matcher, "after 0 tokens")
        return matcher

    def _vocabulary(self) -> Any:
        if llguidance is None:
            raise Fault("this engine has no llguidance, which structured output needs; pip install llguidance there")
        if self._table is None:
            if self._path is None or not self._path.exists():
                raise UnsupportedCheckpoint(
                    "structured output needs the checkpoint's tokenizer.json; save a fast tokenizer beside the weights"
                    " and import the model again"
                )
            try:
                self._table = _read_table(self._path.read_text(), self._vocab_size, list(self._eos) or None)
            except Exception as error:
                raise UnsupportedCheckpoint(
                    f"{self._path.name} cannot be used for structured output: {error}"
                ) from None
        return self._table


def _read_table(tokenizer: str, vocab_size: int, eos: list[int] | None) -> Any:
    try:
        table = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos, slices=[])
    except ValueError:  # the tokenizer knows tokens that the model does not
        table = llguidance.LLTokenizer(tokenizer, eos_token=eos, slices=[])
    time.sleep(BREATH_S)
    return table.with_slices(llguidance.LLTokenizer.json_slices())


def _source(grammar: Grammar) -> str:
    matcher = llguidance.LLMatcher
    made: str
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            made = matcher.grammar_from_json_schema(grammar.source, defaults={"whitespace_pattern": WHITESPACE})
        elif grammar.kind is GrammarKind.REGEX:
            made = matcher.grammar_from_regex(grammar.source)
        else:
            made = matcher.grammar_from_lark(grammar.source)
    except ValueError as error:
        raise InvalidRequest(f"the {grammar.kind} cannot be read: {error}", param="grammar") from None
    return made


def _limits() -> Any:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=MAX_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_SYMBOLS,
        verbose_errors=False,
    )


def _raise_if_broken(matcher: Any, where: str) -> None:
    error = matcher.get_error()
    if error:
        raise InvalidRequest(f"the grammar cannot be followed {where}: {error}".replace(" :", ":"), param="grammar")
