"""An engine in virtual time that is the engine's own mind: its scheduler, its KV blocks, its preemptions."""

from collections.abc import Iterable

from nearline.controller.events import FirstToken, SequenceEnded
from nearline.engine import Batch, EngineConfig, EngineCore, SampledToken
from nearline.protocol import (
    CheckpointInfo,
    CheckpointKind,
    Digest,
    FinishReason,
    ModelId,
    Request,
    RequestId,
    SamplingParams,
    SequenceUpdate,
    StepTimeModel,
)
from nearline.simulator.cost_model import CostModel, Machine
from nearline.simulator.engines import EnginePorts, SimulatedEngine, SimulatedSequence

_BLOCK_SIZE = 16
_SHARED_TOKENS = 512
"""What prompts with the same prefix hash have in common."""


def stepped(ports: EnginePorts, machine: Machine, steps: StepTimeModel, digest: Digest) -> SimulatedEngine:
    """The engine of small fleets."""
    return SteppedEngine(ports, machine.cost, steps, digest)


class SteppedEngine:
    """The engine's own mind: schedule, let the step's time pass, commit. Tokens are made up, their number is true."""

    def __init__(self, ports: EnginePorts, cost: CostModel, steps: StepTimeModel, digest: Digest) -> None:
        self._ports, self._steps, self._cost = ports, steps, cost
        config = EngineConfig(
            num_blocks=-(-cost.kv_tokens // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            max_running=cost.max_running,
            max_step_tokens=cost.max_step_tokens,
            step_time=steps,
        )
        self.core = EngineCore(_checkpoint(digest), config)
        self._is_open = self._is_stepping = False
        self._sequences: dict[RequestId, SimulatedSequence] = {}
        self._num_prompts = 0

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def open(self) -> None:
        self._is_open = True
        self._step()

    def submit(self, sequence: SimulatedSequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self._num_prompts += 1
        num_shared = min(sequence.num_prompt_tokens, _SHARED_TOKENS) if sequence.prefix_hash else 0
        shared = range(-sequence.prefix_hash * _SHARED_TOKENS, -sequence.prefix_hash * _SHARED_TOKENS + num_shared)
        own = self._num_prompts << 20
        prompt = tuple(token % (1 << 32) for token in (*shared, *range(own, own + sequence.num_prompt_tokens)))
        request = Request(
            sequence.request_id,
            ModelId(""),
            prompt[: sequence.num_prompt_tokens],
            SamplingParams(max_tokens=sequence.num_output_tokens),
            sequence.slo,
            sequence.tenant,
            priority=sequence.priority,
        )
        generated = [0] * sequence.num_generated
        self._take(self.core.add(request, sequence.attempt, generated, self._ports.clock()))
        self._step()

    def yield_place(self, request_id: RequestId) -> None:
        self.core.yield_place(request_id)

    def abort(self, request_id: RequestId) -> None:
        if self._sequences.pop(request_id, None) is not None:
            self.core.abort(request_id, self._ports.clock())
        if not self._sequences:
            self._ports.emptied()

    def num_generated(self, request_id: RequestId) -> int | None:
        sequence = self._sequences.get(request_id)
        return None if sequence is None else sequence.num_generated

    def clear(self) -> list[SimulatedSequence]:
        found = list(self._sequences.values())
        for sequence in found:
            self.core.abort(sequence.request_id, self._ports.clock())
        self._sequences.clear()
        return found

    def _step(self) -> None:
        if not self._is_open or self._is_stepping:
            return
        batch = self.core.schedule(self._ports.clock())
        if batch is not None:
            self._is_stepping = True
            seconds = self._steps.step_s(batch.work) + self._cost.step_overhead_s
            self._ports.compute(seconds, self._committed, batch)

    def _committed(self, batch: Batch) -> None:
        self._is_stepping = False
        sampled = [SampledToken(0) for item in batch.items if item.is_sampled]
        self._take(self.core.commit(batch, sampled, self._ports.clock()))
        self._step()
        if not self._sequences:
            self._ports.emptied()

    def _take(self, updates: Iterable[SequenceUpdate]) -> None:
        for update in updates:
            sequence = self._sequences.get(update.request_id)
            if sequence is None or sequence.attempt != update.attempt:
                continue
            sequence.num_generated += len(update.token_ids)
            if update.timings is not None:
                self._ports.post(FirstToken(update.request_id, update.attempt))
            if update.finish_reason is not None:
                del self._sequences[update.request_id]
                is_error = update.finish_reason is FinishReason.ERROR
                reason = FinishReason.ERROR if is_error else FinishReason.STOP
                ended = (update.request_id, update.attempt, reason, sequence.num_generated, update.error)
                self._ports.post(SequenceEnded(*ended))


def _checkpoint(digest: Digest) -> CheckpointInfo:
    return CheckpointInfo(
        digest, CheckpointKind.MODEL, 1, "", "", "", "", (), max_context_tokens=1 << 20, vocab_size=1 << 32
    )
