"""Published machines as cost models, by name. Numbers only. Pure."""

from nearline.simulator.cost_model import CostModel

PROFILES: dict[str, CostModel] = {
    "a10g-7b": CostModel(),
    "a100x2-34b": CostModel(
        prefill_s=0.010, prefill_per_token_s=0.000269, step_s=0.0457, step_per_sequence_s=0.00112, max_running=128
    ),
    "a10g-7b-batch64": CostModel(max_running=64),
}
"""`a10g-7b`: [vtc] cost profile of Llama-2-7B on an A10G (see cost_model.py). `a100x2-34b`: [sarathi] tables of Yi-34B
on two A100: steps of 1 to 128 sequences take 46.8 to 189.3 ms, 16,384 prompt tokens 4,408 ms; straight lines between.
Rates of storage and links are those of the default cost model everywhere."""
