"""Runs one engine step on the device: pack, forward, sample. Owns the decoder, the KV cache and the adapters.

One item's failure is that item's outcome; an exception inside a step is traced to its item by running each alone.
"""

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from nearline.engine.batch_tensors import StepTensors, adapter_order, adapter_runs, step_tensors
from nearline.engine.decode_graphs import CudaGraphs, DecodeGraphs
from nearline.engine.decode_shapes import RecordingPlan
from nearline.engine.grammars import Grammars
from nearline.engine.kv_cache import DEFAULT_BLOCK_SIZE, HostStore, KVCache
from nearline.engine.merge_turns import merge_refusal, num_merged_copies
from nearline.engine.models.decoder import Decoder
from nearline.engine.models.kinds import decoder_of
from nearline.engine.models.layers import Weights, compute_dtype
from nearline.engine.models.lora import AdapterPool
from nearline.engine.models.merged import MergedDecoder
from nearline.engine.prompt_reader import PromptReader
from nearline.engine.sampler import Sampler
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch, BatchItem, SampledToken
from nearline.protocol import Bytes, DecoderSpec, Digest, RequestId
from nearline.protocol.errors import CheckpointCorrupt, ErrorInfo, InstanceFailed, NearlineError, OutOfMemory

log = logging.getLogger(__name__)

_GRAPH_SHARE = 1 / 16
"""Share of the KV cache's budget that is kept for recorded steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Sizes and place of one bound model."""

    kv_bytes: Bytes
    """Budget of the KV cache, recorded steps and merged copies; at least one block must fit beside those."""
    host_bytes: Bytes = 0
    """Budget of the host's memory for KV of preempted sequences."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Positions per block."""
    device: str = "cpu"
    """Torch's name of the device."""
    dtype: torch.dtype | None = None
    """Compute dtype; None: the one stored. Any other copies every weight."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that `min_tokens` holds back and with which a grammar may end."""
    tokenizer: Path | None = None
    """The checkpoint's tokenizer.json, for grammars only."""
    is_recorded: bool = True
    """Whether decoding steps are recorded and replayed on a device that can (CUDA graphs)."""
    is_merging: bool = False
    """Whether room for merged copies of the projections is kept free, in half of the KV cache's budget at most."""


class Runner:
    """The hands of one bound engine. One thread calls `run`, one batch at a time.

    `adapters` is its adapter pool, `grammars` what structured output needs; `failed` names the sequences of the last
    step that failed without an outcome.
    """

    def __init__(self, weights: Weights, spec: DecoderSpec, config: RunnerConfig) -> None:
        """Make views and an empty cache without waiting for the weights' bytes.

        Owns: the views, until it is dropped. Raises CheckpointCorrupt for tensors that are not the spec's,
        OutOfMemory if the cache cannot hold one block.
        """
        self.spec, self.config = spec, config
        self._device = torch.device(config.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Triton launches on the current device, wherever its tensors are
        self.dtype = config.dtype or compute_dtype(spec, weights)
        self.merge_bytes = self._merge_bytes(weights) if config.is_merging else 0
        self.merge_copies = num_merged_copies(config.kv_bytes, self.merge_bytes) if self.merge_bytes else 0
        self.decoder = decoder_of(spec, weights, self.dtype, self._device)
        is_recorded = config.is_recorded and self._device.type == "cuda" and isinstance(self.decoder, Decoder)
        graph_bytes = int(config.kv_bytes * _GRAPH_SHARE) if is_recorded else 0
        kv_bytes = config.kv_bytes - self.merge_copies * self.merge_bytes - graph_bytes
        self.kv = KVCache.within(spec, kv_bytes, config.block_size, self.dtype, self._device)
        self.host = HostStore(self.kv, config.host_bytes)
        self.adapters = AdapterPool(spec, self.dtype, self._device)
        self._merged: MergedDecoder | None = None
        self._step_merged: Digest | None = None
        self.failed: list[tuple[RequestId, ErrorInfo]] = []
        self.grammars = Grammars(config.tokenizer, spec.vocab_size, config.eos_token_ids)
        self._sampler = Sampler(config.eos_token_ids, self.grammars)
        self._prompts = PromptReader(lambda rows_TM, sequence: self.logits(rows_TM, [sequence] * len(rows_TM)))
        self._graphs: DecodeGraphs | None = None
        if is_recorded:
            assert isinstance(self.decoder, Decoder)
            plan = RecordingPlan(max_bytes=graph_bytes)
            self._graphs = DecodeGraphs(self.decoder, self.kv, CudaGraphs(self._device), plan)

    def _merge_bytes(self, weights: Weights) -> Bytes:
        """Bytes of one merged copy; 0, said once in the log, where there can be none."""
        copy_bytes = MergedDecoder.num_bytes(self.spec, self.dtype)
        refusal = MergedDecoder.refusal(self.spec, weights) or merge_refusal(self.config.kv_bytes, copy_bytes)
        if refusal is not None:
            log.warning("adapters of this model are never merged: %s", refusal)
        return 0 if refusal is not None else copy_bytes

    @property
    def num_blocks(self) -> int:
        return self.kv.num_blocks

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[SampledToken]:
        """Run a step and return one outcome per item with `is_sampled`, in the items' order.

        An item that fails without being sampled has no outcome: it stands in `failed` until the next step, and its
        sequence must end before the step is committed, or others would reuse keys and values that are not there.
        Raises CheckpointCorrupt or InstanceFailed if the model's bytes are bad or do not come, or the device is lost.
        """
        self.failed, self._step_merged = [], batch.merged
        order = adapter_order(batch.items)
        items = [batch.items[i] for i in order]
        try:
            self.host.save(batch.swap_outs)
            self.kv.copy_blocks(batch.block_copies)
            self.host.restore(batch.swap_ins)
            results = self._run_isolated(items)
        except RuntimeError as error:
            if not _is_device_lost(error):
                raise
            raise InstanceFailed(f"the device {self._device} failed in a step ({error}); this process ends") from error
        outcomes = dict(zip([i for i in order if batch.items[i].is_sampled], results, strict=True))
        return [outcomes[i] for i, item in enumerate(batch.items) if item.is_sampled]

    def _run_isolated(self, items: Seq[BatchItem]) -> list[SampledToken]:
        try:
            return self._step(items)
        except (CheckpointCorrupt, InstanceFailed):
            raise  # the fault of no item: the bytes of the model are bad or do not come
        except Exception as error:
            if _is_device_lost(error):
                raise  # nothing this process does on it will succeed again
            log.error("a step of %d items failed: %s", len(items), error, exc_info=not isinstance(error, NearlineError))
            if len(items) == 1:
                return self._give_up(items[0], _describe(error))
        # Writing the same keys and values again changes nothing, so every item may simply run once more, alone.
        return [outcome for item in items for outcome in self._run_isolated([item])]

    def _give_up(self, item: BatchItem, error: ErrorInfo) -> list[SampledToken]:
        if item.is_sampled:
            return [SampledToken(0, error=error)]
        self.failed.append((item.sequence.request.request_id, error))
        return []

    @torch.inference_mode()
    def merge(self, digest: Digest, goes_on: Callable[[], bool], kept: Seq[Digest] = ()) -> bool:
        """Merge an adapter into a private copy of the layers, at least one. Returns whether the copy is whole.

        `kept`: the adapters whose copies must stay; the memory of any other may be taken.
        """
        if self._merged is None:
            assert isinstance(self.decoder, Decoder)
            self._merged = MergedDecoder(self.decoder)
        return self._merged.advance(self.adapters.get(digest), goes_on, kept)

    @torch.inference_mode()
    def hidden(self, items: Seq[BatchItem]) -> tuple[torch.Tensor, StepTensors]:
        """Compute the final hidden state of every row of a step whose items are in adapter order.

        Shapes: [T, M]; `logits` makes logits of any of them. Raises whatever is wrong with an item.
        """
        lora = self.adapters.plan(adapter_runs(items), self._step_merged is not None)
        step = step_tensors(items, self.kv.block_size, self.spec.vocab_size, self._device)
        decoder = self.decoder if self._merged is None else self._merged.decoder(self._step_merged)
        decoder.reserve_positions(step.max_context_len)
        hidden_TM = decoder.forward(step.token_ids_T, step.positions_T, step.slots_T, step.meta, self.kv, lora)
        return hidden_TM, step

    def logits(self, hidden_SM: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
        """Project rows onto the vocabulary, each with its own sequence's head. Shapes: [S, M] → [S, V] in fp32."""
        return self.decoder.logits(hidden_SM, self.adapters.heads([s.request.adapter_digest for s in sequences]))

    def _step(self, items: Seq[BatchItem]) -> list[SampledToken]:
        replayed_BV = None if self._graphs is None else self._graphs.logits(items)
        if replayed_BV is not None:
            return self._sampler.sample(replayed_BV, items)
        hidden_TM, step = self.hidden(items)
        self._prompts.read(hidden_TM, items)
        sampled = [item for item in items if item.is_sampled]
        if not sampled:
            return []
        if len(sampled) != step.num_tokens:
            hidden_TM = hidden_TM[step.sampled_S]
        rows = [row for row, item in enumerate(sampled) if item.sequence.needs_token]
        if len(rows) == len(sampled):
            tokens = self._sampler.sample(self.logits(hidden_TM, [item.sequence for item in sampled]), sampled)
            return [self._prompts.add_logprobs(token, item) for token, item in zip(tokens, sampled, strict=True)]
        return self._mixed_outcomes(hidden_TM, sampled, rows)

    def _mixed_outcomes(self, hidden_SM: torch.Tensor, items: Seq[BatchItem], rows: list[int]) -> list[SampledToken]:
        """Sample those in `rows`; the others only wanted their prompts read."""
        tokens: Iterator[SampledToken] = iter(())
        if rows:
            wanted = [items[row] for row in rows]
            logits_SV = self.logits(hidden_SM[rows], [item.sequence for item in wanted])
            tokens = iter(self._sampler.sample(logits_SV, wanted))
        return [
            self._prompts.add_logprobs(next(tokens), item)
            if item.sequence.needs_token
            else self._prompts.outcome(hidden_SM[row], item)
            for row, item in enumerate(items)
        ]


def _is_device_lost(error: Exception) -> bool:
    """Whether the device's context is broken, which it stays: a CUDA error other than running out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


def _describe(error: Exception) -> ErrorInfo:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return ErrorInfo.of(OutOfMemory(f"the engine ran out of memory in a step: {error}; send a shorter prompt"))
    return ErrorInfo.of(error)
