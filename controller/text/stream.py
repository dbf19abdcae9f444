"""Token ids becoming text as they arrive: whole characters only, stop strings never shown, log-probabilities in step.

Pure. The same stream serves streaming and buffered answers, so both give the same text and the same ending.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nearline.protocol import TokenLogprob

Decode = Callable[[Sequence[int]], str]

UNFINISHED = "\ufffd"
"""What decoders put where bytes do not (yet) form a character."""

MAX_LEAD = 3
"""Bytes of a UTF-8 character that may still wait for its last one."""

MAX_HELD = 8
"""So many undecodable bytes in a row cannot all be waiting: the older ones never were text."""

MAX_WINDOW = 64


class Detokenizer:
    """Decodes a growing sequence in a window of a few tokens; what it returned is never taken back.

    `context_ids` are tokens before the first one: decoders that drop a leading space then keep it.
    """

    def __init__(self, decode: Decode, context_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context_ids[-4:])
        self._num_known = len(self._ids)
        self._num_returned = 0

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now."""
        self._ids.append(token_id)
        text = self._new_text()
        num_stable = len(text.rstrip(UNFINISHED))
        if (text and num_stable == len(text)) or len(self._ids) > MAX_WINDOW:
            return self._advance(text)
        if len(text) - num_stable > MAX_HELD:
            num_stable = len(text) - MAX_LEAD
        fresh = text[self._num_returned : num_stable]
        self._num_returned = max(self._num_returned, num_stable)
        return fresh

    def flush(self) -> str:
        """Return what is left at the end of the sequence, unfinished characters as replacement characters."""
        return self._advance(self._new_text())

    def _new_text(self) -> str:
        known = self._decode(self._ids[: self._num_known])
        whole = self._decode(self._ids)
        if whole.startswith(known):
            return whole[len(known) :]
        # Byte-fallback decoders give up on a whole run of bytes when its end is unfinished: decode the new part alone.
        return self._decode(self._ids[self._num_known :])

    def _advance(self, text: str) -> str:
        fresh = text[self._num_returned :]
        del self._ids[: self._num_known]
        self._num_known = len(self._ids)
        self._num_returned = 0
        return fresh


class StopMatcher:
    """Looks for stop strings across pieces of text, holding back only a suffix that may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown and whether a stop string ended it."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        split = len(text) - max(_overlap(text, stop) for stop in self._stops)
        self._held = text[split:]
        return text[:split], False

    def flush(self) -> str:
        """Return what was held back: the sequence ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token whose text was shown: `offset` is where it starts, in characters of the completion."""

    token_id: int
    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one update adds. `is_stopped`: a stop string was met and nothing follows."""

    text: str
    tokens: tuple[TokenText, ...] = ()
    is_stopped: bool = False


class TextStream:
    """The text of one sequence. `hidden_ids` end sequences and have no text; `stops` count from `min_tokens` on."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        hidden_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._hidden_ids = hidden_ids
        self._min_tokens = min_tokens
        self._pending: list[TokenText] = []
        self._num_decoded = 0
        self._num_shown = 0
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> TextDelta:
        """Add the tokens of one update. Tokens after a stop string are neither shown nor counted."""
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if token_id in self._hidden_ids:
                continue
            if logprobs is not None:
                self._pending.append(TokenText(token_id, self._num_decoded, logprobs[index]))
            text, is_stopped = self._match(self._detokenizer.push(token_id))
            shown.append(text)
            if is_stopped:
                return self._delta("".join(shown), is_stopped=True)
        return self._delta("".join(shown))

    def finish(self) -> TextDelta:
        """Return everything held back; call it once, when the sequence ended without a stop string."""
        text, is_stopped = self._match(self._detokenizer.flush())
        if not is_stopped:
            text += self._matcher.flush()
        delta = self._delta(text, is_stopped=is_stopped)
        rest = () if is_stopped else tuple(self._pending)
        return TextDelta(delta.text, delta.tokens + rest, is_stopped)

    def _match(self, decoded: str) -> tuple[str, bool]:
        self._num_decoded += len(decoded)
        if self.num_tokens < self._min_tokens:
            return decoded, False
        return self._matcher.push(decoded)

    def _delta(self, text: str, is_stopped: bool = False) -> TextDelta:
        self._num_shown += len(text)
        ready = [token for token in self._pending if token.offset < self._num_shown]
        del self._pending[: len(ready)]
        return TextDelta(text, tuple(ready), is_stopped)
