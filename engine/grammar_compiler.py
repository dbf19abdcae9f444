"""Compiles grammars beside the step loop, one at a time; the requests that bring them wait here meanwhile."""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from nearline.engine.grammars import Grammars
from nearline.protocol import RequestId
from nearline.protocol.errors import ErrorInfo
from nearline.protocol.frames import Submit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledRequest:
    """A request whose grammar is ready, or cannot be."""

    submit: Submit
    error: ErrorInfo | None


class GrammarCompiler:
    """Owns one daemon thread and the waiting requests. `on_done` is called there whenever `finished` has news."""

    def __init__(self, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._waiting: dict[RequestId, Submit] = {}
        self._jobs: queue.SimpleQueue[tuple[Grammars, Submit | None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[CompiledRequest] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def hold(self, submit: Submit, grammars: Grammars) -> None:
        """Keep a request until its grammar is compiled; it replaces an earlier attempt of the same id."""
        self._waiting[submit.request.request_id] = submit
        self._put(grammars, submit)

    def prepare(self, grammars: Grammars) -> None:
        """Read a model's vocabulary ahead of its first grammar."""
        self._put(grammars, None)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that is wanted no more."""
        self._waiting.pop(request_id, None)

    def forget_all(self) -> list[Submit]:
        """Drop everyone; returns whom."""
        dropped = list(self._waiting.values())
        self._waiting.clear()
        return dropped

    def finished(self) -> list[CompiledRequest]:
        """Return the requests whose grammars have been compiled since the last call and that are still wanted."""
        found = []
        while not self._done.empty():
            one = self._done.get()
            if self._waiting.get(one.submit.request.request_id) is one.submit:
                del self._waiting[one.submit.request.request_id]
                found.append(one)
        return found

    def _put(self, grammars: Grammars, submit: Submit | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammar-compiler", daemon=True)
            self._thread.start()
        self._jobs.put((grammars, submit))

    def _work(self) -> None:
        while True:
            grammars, submit = self._jobs.get()
            if submit is None:
                _prepare(grammars)
            else:
                self._done.put(CompiledRequest(submit, self._compile(grammars, submit)))
                self._on_done()
            del grammars, submit  # let go of the model while waiting for the next job

    def _compile(self, grammars: Grammars, submit: Submit) -> ErrorInfo | None:
        grammar = submit.request.sampling.grammar
        try:
            if grammar is not None and self._waiting.get(submit.request.request_id) is submit:
                grammars.compile(grammar)
        except Exception as error:
            return ErrorInfo.of(error)
        return None


def _prepare(grammars: Grammars) -> None:
    try:
        grammars.prepare()
        log.info("prepared for structured output")
    except Exception as error:  # the first request with a grammar will be told
        log.info("structured output is not possible with this model: %s", error)
