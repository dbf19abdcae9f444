"""The engine's mind: sequences come in, steps go out, tokens come back, every sequence ends exactly once. Pure.

Its door has two leaves, so that the loop around it is schedule, run, commit. Everything that ends a sequence
returns the update that says so, except an abort and a replacement by a later attempt, which end it in silence.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from nearline.engine.adapters import AdapterAction, AdapterTable, FreeAdapter
from nearline.engine.block_manager import BlockManager, cache_root
from nearline.engine.config import EngineConfig, MergeMode, PolicyName
from nearline.engine.merge_turns import MergeTurns
from nearline.engine.policy import FirstCome, Policy
from nearline.engine.policy_mlfq import FeedbackQueue
from nearline.engine.policy_shortest import ShortestFirst
from nearline.engine.scheduler import Scheduler
from nearline.engine.sequence import Sequence, SequenceState
from nearline.engine.step_pace import StepPace
from nearline.engine.types import Batch, SampledToken
from nearline.engine.validation import request_problem
from nearline.protocol import (
    Bytes,
    CheckpointInfo,
    Digest,
    FinishReason,
    Request,
    RequestId,
    Seconds,
    SequenceTimings,
    SequenceUpdate,
    StepTimeModel,
    StepWork,
)
from nearline.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine holds between two steps."""

    num_running: int
    num_waiting: int
    kv_tokens_used: int


class EngineCore:
    """Owns every sequence of one bound engine. `clock`: the caller's `now` never goes backwards."""

    def __init__(self, checkpoint: CheckpointInfo, config: EngineConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.is_prefix_cached)
        self.adapters = AdapterTable(config.max_adapters, config.max_adapter_bytes)
        believed = config.step_time or StepTimeModel.guess(checkpoint.num_bytes)
        self.pace = StepPace(believed, is_profiled=config.step_time is not None)
        self.scheduler = Scheduler(config, self.blocks, self.adapters, _policy(config, self.pace), self.pace)
        is_merging = config.merge is not MergeMode.NEVER and config.merge_bytes
        self._merge = MergeTurns(config, believed, self.adapters.is_ready) if is_merging else None
        self._lent: dict[Digest, int] = {}
        self.num_added = 0
        self.num_ended = 0
        self.checkpoint = checkpoint
        self._live: dict[RequestId, Sequence] = {}

    @property
    def load(self) -> EngineLoad:
        used = self.blocks.num_used * self.config.block_size
        return EngineLoad(len(self.scheduler.running), len(self.scheduler.waiting), used)

    @property
    def longest_step_s(self) -> Seconds:
        """Predict the longest step there can be: as many as may run decode all there is room for, beside the last
        chunk of the longest prompt, or beside whole prompts if they are not cut."""
        room = self.config.kv_tokens
        context = min(self.checkpoint.max_context_tokens, room)
        tokens = room if self.config.max_step_tokens is None else min(self.config.max_step_tokens, room)
        squares = tokens * (2 * context - min(tokens, context))
        return self.pace.model.step_s(StepWork(tokens, squares, self.config.max_running, room))

    def add(
        self,
        request: Request,
        attempt: int,
        generated: Seq[int],
        now: Seconds,
        predicted_tokens: float | None = None,
    ) -> list[SequenceUpdate]:
        """Start a sequence, or end it at once if it cannot run or has nothing left to do.

        `predicted_tokens` is how many it will probably generate in all, if anybody knows. A later attempt replaces an
        earlier one of the same id; an earlier or equal one is ignored.
        """
        known = self._live.get(request.request_id)
        if known is not None:
            if attempt <= known.attempt:
                return []
            self._end(known, now)
        self.num_added += 1
        problem = request_problem(request, generated, self.checkpoint, self.config)
        if problem is None and request.adapter_digest is not None:
            problem = self.adapters.problem(request.adapter_digest)
        sequence = Sequence(request, attempt, [*request.prompt_token_ids, *generated], now, serial=self.num_added)
        sequence.predicted_tokens = predicted_tokens
        if problem is not None:
            self.num_ended += 1
            return [_end_update(sequence, FinishReason.ERROR, ErrorInfo.of(problem))]
        sequence.max_total = self._max_total(sequence)
        sequence.cache_root = cache_root(self.checkpoint.digest, request.adapter_digest, request.salt)
        reason = self._finish_reason(sequence) if generated else None
        if reason is not None:
            self.num_ended += 1
            return [_end_update(sequence, reason)]
        self._live[request.request_id] = sequence
        self.scheduler.add(sequence)
        if self.adapters.join(sequence):
            sequence.adapter_ready_at = now
        return []

    def yield_place(self, request_id: RequestId) -> None:
        """Let a running sequence give its place to whoever stands before it; it goes on when there is room again."""
        sequence = self._live.get(request_id)
        if sequence is not None and sequence.state is SequenceState.RUNNING:
            sequence.must_yield = True

    def abort(self, request_id: RequestId, now: Seconds) -> bool:
        """End a sequence in silence and free its blocks. Returns whether it was there."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, now)
        return sequence is not None

    def schedule(self, now: Seconds) -> Batch | None:
        """Return the next step, or None if nothing can run until something happens or a `wanted_copy` is made."""
        batch = self._schedule(now)
        if self.scheduler.is_short and self.blocks.num_lent and not self.adapters.squeeze() and batch is None:
            # Nothing runs and nothing can be given up: whoever waits is let in beside the adapters.
            self._take_back(*self._lent)
            batch = self._schedule(now)
        return batch

    @property
    def has_errands(self) -> bool:
        """Whether `adapter_actions` will make room for somebody who waits."""
        return self.adapters.is_squeezed

    def _schedule(self, now: Seconds) -> Batch | None:
        if self._merge is None:
            return self.scheduler.schedule(now)
        waiting = [s for s in self.scheduler.waiting if self.adapters.can_start(s)]
        return self._merge.schedule([*self.scheduler.running, *waiting], now, self.scheduler.schedule)

    @property
    def wanted_copy(self) -> Digest | None:
        """The adapter that should be merged into a copy of the base, beside the steps."""
        return None if self._merge is None else self._merge.wanted

    @property
    def kept_copies(self) -> tuple[Digest, ...]:
        """The adapters whose merged copies must stay; the memory of any other may be taken."""
        return () if self._merge is None else self._merge.kept

    def copy_made(self, digest: Digest, seconds: Seconds) -> None:
        """Take in that this adapter's merged copy is whole, and how long making it took."""
        if self._merge is not None:
            self._merge.copy_made(digest, seconds)

    def commit(self, batch: Batch, sampled: Seq[SampledToken], now: Seconds) -> list[SequenceUpdate]:
        """Take in what a step computed: one SampledToken per item with `is_sampled`, in order."""
        updates = []
        tokens = iter(sampled)
        for item in batch.items:
            token = next(tokens) if item.is_sampled else None
            sequence = item.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue  # ended since the step was scheduled
            sequence.num_computed = item.start + item.num_tokens
            if token is None or token.error is None:  # what failed is never reused
                self.blocks.publish(sequence, item.start)
            if token is not None:
                updates.append(self._append(sequence, token, now))
        return updates

    def measured(self, batch: Batch, seconds: Seconds) -> None:
        """Take in how long a step took, so that the next ones are cut better."""
        if self._merge is not None:
            self._merge.measured(batch, seconds)
        self.pace.observe(batch.work, seconds)

    def fail(self, request_ids: Seq[RequestId], error: ErrorInfo, now: Seconds) -> list[SequenceUpdate]:
        """End these sequences with an error; those that have ended already are left out."""
        failed = [self._live[request_id] for request_id in request_ids if request_id in self._live]
        for sequence in failed:
            self._end(sequence, now)
        return [_end_update(sequence, FinishReason.ERROR, error) for sequence in failed]

    def fail_all(self, error: ErrorInfo, now: Seconds) -> list[SequenceUpdate]:
        """End every sequence with an error."""
        return self.fail(list(self._live), error, now)

    def load_adapter(self, digest: Digest, directory: str, is_ahead: bool = False) -> bool:
        """Make an adapter known. Returns whether it is ready already; if not, `adapter_actions` will ask for it, with
        `is_ahead` only while nobody needs the reader, a place or blocks."""
        return self.adapters.announce(digest, directory, is_ahead)

    def unload_adapter(self, digest: Digest) -> None:
        """Free an adapter once the sequences that named it have ended."""
        self.adapters.retire(digest)

    def adapter_actions(self) -> list[AdapterAction]:
        """Decide which adapters to read and free now; carry all of them out before the next step."""
        actions = self.adapters.plan(may_read_ahead=not self.scheduler.is_short)
        self._take_back(*(action.digest for action in actions if isinstance(action, FreeAdapter)))
        return actions

    def _take_back(self, *adapters: Digest) -> None:
        """Use the blocks again whose memory these adapters had."""
        for digest in adapters:
            self.blocks.take_back(self._lent.pop(digest, 0))

    def adapter_loaded(self, digest: Digest, num_bytes: Bytes, now: Seconds) -> None:
        """Take in that an adapter is on the device."""
        self.adapters.loaded(digest, num_bytes, now)
        if self.config.block_bytes > 1:
            wanted = -(-num_bytes // self.config.block_bytes)
            self._lent[digest] = self.blocks.lend(max(0, min(wanted, self.scheduler.num_spare)))
        for sequence in self.scheduler.waiting:
            if sequence.request.adapter_digest == digest and sequence.adapter_ready_at is None:
                sequence.adapter_ready_at = now

    def adapter_failed(self, digest: Digest, error: ErrorInfo, now: Seconds) -> list[SequenceUpdate]:
        """Take in that an adapter cannot be used: the sequences that named it fail, nobody else."""
        named = [s.request.request_id for s in self._live.values() if s.request.adapter_digest == digest]
        updates = self.fail(named, error, now)
        self.adapters.failed(digest, error)
        return updates

    def check(self) -> None:
        """Assert the invariants."""
        listed = [*self.scheduler.waiting, *self.scheduler.running]
        assert sorted(s.serial for s in listed) == sorted(s.serial for s in self._live.values())
        assert self.num_added == self.num_ended + len(self._live), "a sequence ended twice or was lost"
        assert len(self.scheduler.running) <= self.config.max_running
        for sequence in listed:
            is_running = sequence in self.scheduler.running
            assert sequence.state is (SequenceState.RUNNING if is_running else SequenceState.WAITING)
            assert is_running or not sequence.block_table, "a waiting sequence holds blocks"
            is_over = sequence.needs_token and len(sequence.token_ids) >= sequence.max_total
            assert not is_over, "a sequence outlives its last token"
            assert sequence.num_computed <= len(sequence.block_table) * self.config.block_size
        self.blocks.check(self.scheduler.running)
        self.scheduler.host.check(listed)
        self.adapters.check()

    def _max_total(self, sequence: Sequence) -> int:
        """Tokens at which the sequence ends: by max_tokens, by the context, or by the size of the KV cache."""
        asked = sequence.num_prompt + sequence.request.sampling.max_tokens
        room = min(self.checkpoint.max_context_tokens, self.config.kv_tokens + 1)
        return min(asked, max(room, sequence.num_prompt + 1))

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        sampling, token = sequence.request.sampling, sequence.token_ids[-1]
        if sequence.num_generated >= sampling.min_tokens:
            is_eos = token in self.checkpoint.eos_token_ids and not sampling.ignore_eos
            if is_eos or token in sampling.stop_token_ids:
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.max_total else None

    def _append(self, sequence: Sequence, token: SampledToken, now: Seconds) -> SequenceUpdate:
        if token.error is not None:
            self._end(sequence, now)
            return _end_update(sequence, FinishReason.ERROR, token.error)
        timings = None
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            timings = _timings(sequence)
        if sequence.needs_token:
            sequence.token_ids.append(token.token_id)
            reason = FinishReason.STOP if token.is_last else self._finish_reason(sequence)
        else:
            reason = FinishReason.LENGTH if sequence.request.pooling is None else FinishReason.STOP
        if reason is not None:
            self._end(sequence, now)
        return SequenceUpdate(
            request_id=sequence.request.request_id,
            attempt=sequence.attempt,
            token_ids=(token.token_id,) if sequence.needs_token else (),
            finish_reason=reason,
            logprobs=None if token.logprob is None else (token.logprob,),
            timings=timings,
            prompt_logprobs=token.prompt_logprobs,
            embedding=token.embedding,
        )

    def _end(self, sequence: Sequence, now: Seconds) -> None:
        self.scheduler.remove(sequence)
        self.adapters.leave(sequence, now)
        del self._live[sequence.request.request_id]
        self.num_ended += 1


def _policy(config: EngineConfig, pace: StepPace) -> Policy:
    match config.policy:
        case PolicyName.FCFS:
            return FirstCome()
        case PolicyName.SHORTEST:
            return ShortestFirst(config.wait_bound_s)
        case PolicyName.MLFQ:
            return FeedbackQueue(lambda num_tokens: pace.model.prefill_s(num_tokens))


def _end_update(sequence: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> SequenceUpdate:
    return SequenceUpdate(sequence.request.request_id, sequence.attempt, (), finish_reason=reason, error=error)


def _timings(sequence: Sequence) -> SequenceTimings:
    """Split the time to the first token; the parts add up to it."""
    started_at = sequence.arrived_at if sequence.first_scheduled_at is None else sequence.first_scheduled_at
    first_token_at = started_at if sequence.first_token_at is None else sequence.first_token_at
    ready_at = sequence.arrived_at if sequence.adapter_ready_at is None else sequence.adapter_ready_at
    adapter_s = min(ready_at, started_at) - sequence.arrived_at
    return SequenceTimings(
        waiting_s=started_at - sequence.arrived_at - adapter_s,
        adapter_s=adapter_s,
        prefill_s=first_token_at - started_at,
        num_cached_tokens=sequence.num_cached,
    )
