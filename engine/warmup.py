"""Pre-warms a process: a dummy model of two small layers runs once through everything a real one will need."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from nearline import kernels
from nearline.engine.models.lora import Adapter, LoraWeights
from nearline.engine.runner import Runner, RunnerConfig
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch, BatchItem
from nearline.protocol import DecoderSpec, Digest, ModelId, Request, RequestId, SamplingParams, tensor_slots

_PROMPT = 40
_SPEC = DecoderSpec(
    family="llama", architecture="LlamaForCausalLM", num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_dim=128, vocab_size=512, max_context_tokens=128, dtype="float32", norm_eps=1e-6,
    rope_theta=10_000.0, is_tied=True, has_qkv_bias=True, has_qk_norm=True,
)  # fmt: skip


def warm_up(device: str, num_threads: int) -> None:
    """Run a prefill and decodes, greedy and sampled, with and without an adapter, in the common dtypes."""
    kernels.set_num_threads(num_threads)
    for dtype in (torch.bfloat16, torch.float32):
        runner = Runner(_DummyWeights(dtype), _SPEC, RunnerConfig(kv_bytes=1 << 20, device=device))
        runner.adapters.add(_dummy_adapter(dtype, torch.device(device)))
        sequences = [_sequence(0, None, 0.0), _sequence(1, Digest("warm-up"), 0.8)]
        prefill = [BatchItem(sequence, 0, _PROMPT, True) for sequence in sequences]
        _run(runner, Batch(prefill, block_copies=((4, 5),)))
        for sequence in sequences:
            sequence.token_ids.append(1)
        _run(runner, Batch([BatchItem(sequence, _PROMPT, 1, True) for sequence in sequences]))


def _run(runner: Runner, batch: Batch) -> None:
    for outcome in runner.run(batch):
        if outcome.error is not None:
            raise outcome.error.exception()


class _DummyWeights:
    def __init__(self, dtype: torch.dtype) -> None:
        self._tensors = {slot.name: torch.full(slot.shape, 0.01, dtype=dtype) for slot in tensor_slots(_SPEC)}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def fused(self, names: Seq[str]) -> Tensor:
        return torch.cat([self._tensors[name] for name in names])

    def wait_for(self, names: Seq[str]) -> None: ...

    def is_complete(self) -> bool:
        return True


def _dummy_adapter(dtype: torch.dtype, device: torch.device) -> Adapter:
    a = torch.full((4, _SPEC.model_dim), 0.01, dtype=dtype, device=device)
    b = torch.full((_SPEC.num_heads * _SPEC.head_dim, 4), 0.01, dtype=dtype, device=device)
    return Adapter.of(Digest("warm-up"), [{"q_proj": LoraWeights(a, b)}] * _SPEC.num_layers)


def _sequence(index: int, adapter: Digest | None, temperature: float) -> Sequence:
    sampling = SamplingParams(temperature=temperature, top_p=0.9, logprobs=1 if temperature else None)
    request = Request(RequestId(f"warm-up-{index}"), ModelId(""), (1,) * _PROMPT, sampling, adapter_digest=adapter)
    blocks = [4 * index + block for block in range(4)]
    return Sequence(request, 1, list(request.prompt_token_ids), arrived_at=0.0, block_table=blocks)
