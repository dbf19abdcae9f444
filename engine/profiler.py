"""Measures real steps of a bound model, one at a time and only while nothing else runs, until its profile is known."""

import logging
import time

import torch

from nearline.engine.block_manager import BlockManager
from nearline.engine.core import EngineCore
from nearline.engine.kv_cache import HostStore
from nearline.engine.profile_plan import ProfileLimits, ProfilePlan, StepShape
from nearline.engine.runner import Runner
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch, BatchItem
from nearline.protocol import Digest, ModelId, Request, RequestId, SamplingParams, Seconds, StepProfile
from nearline.protocol.errors import ErrorInfo, InstanceFailed, Overloaded
from nearline.protocol.frames import ProfileFinished, ProfileInstance, ProfileProgress, TaskFailed

PATIENCE_S: Seconds = 60.0
"""A profile that has waited this long for a moment without requests is given up."""
_COPIED_BLOCKS = 64
_PRIMES = (7919, 104729)
log = logging.getLogger(__name__)


class Profiler:
    """One profile under way. `advance` measures one step; whoever calls it has seen that nothing else can run."""

    def __init__(self, wish: ProfileInstance, core: EngineCore, runner: Runner, num_threads: int) -> None:
        self.wish = wish
        self._core, self._runner, self._num_threads = core, runner, num_threads
        self._digest: Digest = core.checkpoint.digest
        config = core.config
        limits = ProfileLimits(
            max_context_tokens=core.checkpoint.max_context_tokens,
            kv_tokens=config.kv_tokens,
            max_step_tokens=config.max_step_tokens or config.kv_tokens,
            max_running=config.max_running,
        )
        self._plan = ProfilePlan(core.checkpoint.num_bytes, limits)
        self._is_warm = False
        self._waits_since = time.monotonic()

    def wait(self) -> TaskFailed | None:
        """Let requests go first. Returns the failure when they have for too long."""
        waited_s = time.monotonic() - self._waits_since
        if waited_s < PATIENCE_S:
            return None
        busy = Overloaded(f"the instance has had no idle moment for {waited_s:.0f} s; profile it when it is quiet")
        return TaskFailed(self.wish.task_id, ErrorInfo.of(busy))

    def advance(self) -> ProfileProgress | ProfileFinished | TaskFailed:
        """Measure one step and say how far the profile is, or what came of it."""
        self._waits_since = time.monotonic()
        shape = self._plan.next()
        try:
            if shape is None:
                return ProfileFinished(self.wish.task_id, self._result())
            seconds = self._measure(shape)
        except Exception as error:  # a profile's failure is its own
            log.exception("a profile failed")
            return TaskFailed(self.wish.task_id, ErrorInfo.of(error))
        if self._is_warm:
            self._plan.observe(seconds)
        self._is_warm = True
        return ProfileProgress(self.wish.task_id, "measuring", self._plan.num_done, self._plan.num_total)

    def _measure(self, shape: StepShape) -> Seconds:
        """Run a step of made-up sequences in blocks that nobody uses, and give the blocks back."""
        blocks: BlockManager = self._core.blocks
        items: list[BatchItem] = []
        try:
            for num_tokens, start in shape.chunks:
                sequence = self._sequence(start + num_tokens)
                sequence.num_computed = start
                if blocks.extend(sequence, num_tokens) is None:
                    raise InstanceFailed("the KV cache is in use; profile the instance when it is idle")
                items.append(BatchItem(sequence, start, num_tokens, is_sampled=True))
            # Memory that was never written is one page of zeros: reading it would be too quick to be true.
            self._runner.kv.fill([block for item in items for block in item.sequence.block_table], 0.01)
            started_at = time.perf_counter()
            outcomes = self._runner.run(Batch(items))
            seconds = time.perf_counter() - started_at
        finally:
            for item in items:
                blocks.release(item.sequence)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error.exception()
        return seconds

    def _sequence(self, num_tokens: int) -> Sequence:
        vocab_size = self._core.checkpoint.vocab_size
        tokens = [(_PRIMES[0] * i + _PRIMES[1]) % vocab_size for i in range(num_tokens)]
        request = Request(RequestId(""), ModelId(""), tuple(tokens), SamplingParams(temperature=0.0))
        return Sequence(request, 1, tokens, arrived_at=0.0)

    def _result(self) -> StepProfile:
        model, prefill_error, decode_error, num_steps = self._plan.result()
        return StepProfile(
            digest=self._digest,
            device=_device_name(self._runner.config.device),
            num_threads=self._num_threads,
            model=model,
            prefill_error=prefill_error,
            decode_error=decode_error,
            num_steps=num_steps,
            copy_bytes_per_s=self._copy_rate(),
            measured_at=time.time(),
        )

    def _copy_rate(self) -> float:
        """Move blocks to the host and back. Their content stays what it is."""
        kv = self._runner.kv
        num_blocks = min(_COPIED_BLOCKS, kv.num_blocks)
        host = HostStore(kv, num_blocks * kv.block_bytes)
        moves = [(block, block) for block in range(num_blocks)]
        seconds: list[Seconds] = []
        for _ in range(3):
            started_at = time.perf_counter()
            host.save(moves)
            host.restore(moves)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_at)
        return 2 * num_blocks * kv.block_bytes / min(seconds)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
