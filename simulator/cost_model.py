"""What things cost in virtual time: reading bytes, binding, prefill, a decode step. Numbers only, no policy. Pure."""

from dataclasses import dataclass

from nearline.protocol import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One kind of machine. A step of n sequences takes `step_s + n · step_per_sequence_s`.

    Source: [vtc] cost profile of Llama-2-7B on an A10G, least-squares fit: prefill 0.2137 ms per token + 0.452 ms,
    step 16.30 ms + 0.245 ms per sequence (its third term, per context token, is left out).
    """

    ssd_bytes_per_s: float = 2.0e9
    dram_bytes_per_s: float = 12.0e9
    bind_s: Seconds = 0.1
    process_s: Seconds = 3.0
    stop_s: Seconds = 0.05
    max_running: int = 16
    prefill_s: Seconds = 0.000452
    prefill_per_token_s: Seconds = 0.0002137
    step_s: Seconds = 0.0163
    step_per_sequence_s: Seconds = 0.000245

    def read_s(self, ssd_bytes: Bytes, dram_bytes: Bytes) -> Seconds:
        return ssd_bytes / self.ssd_bytes_per_s + dram_bytes / self.dram_bytes_per_s

    def first_token_s(self, num_prompt_tokens: int) -> Seconds:
        return self.prefill_s + self.prefill_per_token_s * num_prompt_tokens

    def decode_s(self, num_tokens: int, num_running: int) -> Seconds:
        return num_tokens * (self.step_s + self.step_per_sequence_s * num_running)
