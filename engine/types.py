"""Words of the engine: what a step consists of and what comes out of it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from nearline.engine.sequence import Sequence
from nearline.protocol import Digest, StepWork, TokenLogprob
from nearline.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's share of a step: compute positions [start, start + num_tokens) of `sequence.token_ids`.

    Their KV goes to the blocks of `sequence.block_table`. If `is_sampled`, the logits after the last of these
    positions choose the sequence's next token. The runner reads the sequence and never changes it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One engine step. Before it blocks move, in this order: `swap_outs` (device, host), `block_copies` (source,
    destination: copy-on-write of shared blocks), `swap_ins` (host, device)."""

    items: Seq[BatchItem]
    block_copies: Seq[tuple[int, int]] = field(default_factory=tuple)
    swap_outs: Seq[tuple[int, int]] = field(default_factory=tuple)
    swap_ins: Seq[tuple[int, int]] = field(default_factory=tuple)
    merged: Digest | None = None
    """All items are of this adapter and run on the weights it is merged into; None: unmerged."""

    @property
    def work(self) -> StepWork:
        """What the step computes, as the law of step times counts it."""
        tokens = squares = decoding = context = 0
        for item in self.items:
            if item.num_tokens == 1 and item.is_sampled:
                decoding += 1
                context += item.start + 1
            else:
                tokens += item.num_tokens
                squares += item.num_tokens * (2 * item.start + item.num_tokens)
        return StepWork(tokens, squares, decoding, context)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Outcome for one item with `is_sampled`. `error` fails that sequence alone.

    `is_last`: the token completes the sequence's grammar. A sequence that needs no token (`needs_token`) has only
    what it read of its prompt here; `prompt_logprobs` also come beside the first token of one that asked for both.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    error: ErrorInfo | None = None
    is_last: bool = False
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    embedding: bytes | None = None
