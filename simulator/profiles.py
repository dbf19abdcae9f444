"""Published machines as cost models, by name. Numbers only. Pure."""

from nearline.protocol import StepTimeModel
from nearline.simulator.cost_model import CostModel

_YI_34B = StepTimeModel(
    prefill_base_s=0.0457,
    prefill_per_token_s=0.000205,
    prefill_per_square_s=3.4e-9,
    decode_base_s=0.0457,
    decode_per_context_s=0.0,
    decode_per_sequence_s=0.00112,
)
_LLAMA_70B_H100 = StepTimeModel(
    prefill_base_s=0.0306,
    prefill_per_token_s=0.00006,
    prefill_per_square_s=4.8e-9,
    decode_base_s=0.0306,
    decode_per_context_s=0.0,
    decode_per_sequence_s=0.00024,
)

PROFILES: dict[str, CostModel] = {
    "a10g-7b": CostModel(),
    "a10g-7b-batch64": CostModel(max_running=64),
    "a100x2-34b": CostModel(steps=_YI_34B, max_running=128, kv_tokens=200_000),
    "h100x8-70b": CostModel(steps=_LLAMA_70B_H100, max_running=128, kv_tokens=1_000_000),
}
"""`a10g-7b`: [vtc] cost profile of Llama-2-7B on an A10G (see cost_model.py). `a100x2-34b`: [sarathi] tables of Yi-34B
on two A100: steps of 1 to 128 sequences take 46.8 to 189.3 ms, prompts of 2,048 and 16,384 tokens 366 and 4,408 ms.
`h100x8-70b`: Splitwise's table of Llama-2-70B on eight H100. Storage is that of the default cost model everywhere."""
