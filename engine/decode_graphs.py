"""Decoding steps recorded once per size and replayed: one launch instead of hundreds, which cost more than they run.

`Record` is the whole interface to the device; CUDA graphs are one, and a function that runs the step again another.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearline.engine.decode_shapes import DecodeShape, RecordingPlan, decode_numbers, shape_of
from nearline.engine.kv_cache import KVCache
from nearline.engine.models.decoder import Decoder
from nearline.engine.types import BatchItem
from nearline.kernels import AttentionMeta
from nearline.protocol import Bytes

log = logging.getLogger(__name__)

Work = Callable[[], Tensor]
"""A step that reads and writes always the same tensors; returns its logits [B, V]."""
Record = Callable[[Work], tuple[Work, Bytes]]
"""Records a step and returns what replays it, and the bytes of device memory that are kept for it."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    numbers: Tensor
    staging: Tensor
    replay: Work


class DecodeGraphs:
    """Recorded decoding steps of one decoder and its cache. Owns: their inputs, and what the device keeps of them."""

    def __init__(self, decoder: Decoder, kv: KVCache, record: Record, plan: RecordingPlan) -> None:
        self._decoder, self._kv, self._record, self._plan = decoder, kv, record, plan
        self._recorded: dict[DecodeShape, _Recorded] = {}
        self._is_off = False

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def logits(self, items: Seq[BatchItem]) -> Tensor | None:
        """Run a decoding step and return its logits, valid until the next call; None if it has to be run op by op.

        Shapes: [B, V] fp32. Raises InvalidRequest as step_tensors does.
        """
        shape = None if self._is_off else shape_of(items, self._kv.block_size)
        if shape is None:
            return None
        recorded = self._recorded.get(shape)
        if recorded is None:
            is_due = self._plan.is_due(shape, shape.kept_bytes(self._decoder.spec.vocab_size))
            recorded = self._try_record(shape) if is_due else None
        if recorded is None:
            return None
        numbers = decode_numbers(items, shape, self._kv.block_size, self._decoder.spec.vocab_size)
        # The staging memory is free again: the caller has read the tokens of the step before, so its copy has ended.
        recorded.staging.copy_(torch.tensor(numbers, dtype=torch.int32))
        recorded.numbers.copy_(recorded.staging, non_blocking=True)
        return recorded.replay()[: len(items)]

    def _try_record(self, shape: DecodeShape) -> _Recorded | None:
        try:
            recorded = self._recorded[shape] = self._recording(shape)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if isinstance(error, torch.AcceleratorError):
                raise  # the context may be lost: the runner knows what to do
            log.warning("decoding steps are not recorded, they run op by op: %s", error)
            self._is_off = True
            return None
        return recorded

    def _recording(self, shape: DecodeShape) -> _Recorded:
        spec, kv, decoder = self._decoder.spec, self._kv, self._decoder
        # A table that grew later would leave the recorded steps with the old one.
        decoder.reserve_positions(min(spec.max_context_tokens, kv.num_tokens))
        padded = torch.tensor(decode_numbers([], shape, kv.block_size, spec.vocab_size), dtype=torch.int32)
        numbers = padded.to(kv.store.device, copy=True)
        staging = padded.pin_memory() if numbers.is_cuda else padded
        ids_B, positions_B, slots_B, starts_B1, lens_B, blocks = torch.split(numbers, list(shape.parts))
        meta = AttentionMeta(starts_B1, lens_B, blocks.view(shape.num_sequences, shape.num_blocks), 1)

        def work() -> Tensor:
            return decoder.logits(decoder.forward(ids_B, positions_B, slots_B, meta, kv))

        replay, num_bytes = self._record(work)
        self._plan.recorded(max(num_bytes, shape.kept_bytes(spec.vocab_size)))
        return _Recorded(numbers, staging, replay)


class CudaGraphs:
    """Records steps as CUDA graphs, all with one pool of memory. Owns: that pool, in which each graph keeps its logits
    and all share what lies between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def __call__(self, work: Work) -> tuple[Work, Bytes]:
        """Run the step once on padding, which compiles and allocates what is missing, then record it."""
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if self._side is None:  # one for all: the allocator keeps memory for each stream
                self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                work()
            torch.cuda.current_stream().wait_stream(self._side)
            graph = torch.cuda.CUDAGraph()
            # What the allocator holds in reserve goes back first, as it would when the recording begins.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            # Other threads go on copying chunks and adapters meanwhile; only this one must not.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits_BV = work()
            kept_bytes = max(0, torch.cuda.memory_reserved() - before)

        def replay() -> Tensor:
            graph.replay()
            return logits_BV

        return replay, kept_bytes
