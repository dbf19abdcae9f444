"""A device without tensors, that notices any wrong, stale or shared KV, and an engine around it."""

from typing import Any

from nearline.engine import Batch, EngineConfig, EngineCore, SampledToken, Sequence
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest, ModelId, Request, RequestId, SamplingParams
from nearline.protocol.errors import ErrorInfo

VOCAB, EOS = 50, 0
Slots = dict[tuple[int, int], tuple[Any, ...]]


def info(**changes: Any) -> CheckpointInfo:
    fields: dict[str, Any] = {
        "digest": Digest("d" * 32), "kind": CheckpointKind.MODEL, "num_bytes": 1, "family": "llama",
        "architecture": "LlamaForCausalLM", "source": "test", "dtype": "float32", "files": (),
        "max_context_tokens": 64, "vocab_size": VOCAB, "eos_token_ids": (EOS,),
    }  # fmt: skip
    return CheckpointInfo(**(fields | changes))


def next_token(adapter: str | None, tokens: list[int]) -> int:
    """A model that looks at everything before: the oracle of what any sequence must generate."""
    state = 7 if adapter is None else sum(adapter.encode())
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state % VOCAB


def solo(request: Request, max_context: int = 64) -> list[int]:
    """Generate alone, by the definition: eos and stop tokens end it and are part of the output."""
    sampling, tokens = request.sampling, list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        output.append(next_token(request.adapter_digest, tokens))
        tokens.append(output[-1])
        is_stop = (output[-1] == EOS and not sampling.ignore_eos) or output[-1] in sampling.stop_token_ids
        if is_stop and len(output) >= sampling.min_tokens:
            return output
        if len(output) >= sampling.max_tokens or len(tokens) >= max_context:
            return output


def _move(source: Slots, target: Slots, moves: Any, block_size: int) -> None:
    """Copy blocks, all at once: what is not there in the source is not there in the target afterwards."""
    copied = {(b, i): source.get((a, i)) for a, b in moves for i in range(block_size)}
    for slot, value in copied.items():
        target.pop(slot, None)
        if value is not None:
            target[slot] = value


class FakeDevice:
    """Runs batches on a KV cache whose every slot names the whole prefix it was computed from."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.slots: Slots = {}
        self.host: Slots = {}
        self.read: dict[int, int] = {}
        self.failing: set[str] = set()

    def run(self, batch: Batch) -> list[SampledToken]:
        _move(self.slots, self.host, batch.swap_outs, self.core.config.block_size)
        _move(self.slots, self.slots, batch.block_copies, self.core.config.block_size)
        _move(self.host, self.slots, batch.swap_ins, self.core.config.block_size)
        self._assert_written_blocks_are_private(batch)
        for item in batch.items:
            assert item.start == item.sequence.num_computed
            if item.sequence.reads_prompt:
                assert item.start in (0, self.read.get(item.sequence.serial)), "part of a prompt was never read"
                self.read[item.sequence.serial] = item.start + item.num_tokens
            for position in range(item.start, item.start + item.num_tokens):
                self.slots[self._slot(item.sequence, position)] = self._value(item.sequence, position)
        return [self._sample(item.sequence) for item in batch.items if item.is_sampled]

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        size = self.core.config.block_size
        return sequence.block_table[position // size], position % size

    def _value(self, sequence: Sequence, position: int) -> tuple[Any, ...]:
        request = sequence.request
        return (request.adapter_digest, request.salt, *sequence.token_ids[: position + 1])

    def _sample(self, sequence: Sequence) -> SampledToken:
        """Attend to every position: all of them must hold what belongs there."""
        for position in range(len(sequence.token_ids)):
            held = self.slots.get(self._slot(sequence, position))
            assert held == self._value(sequence, position), f"position {position} reads another prefix"
        if sequence.request.request_id in self.failing:
            return SampledToken(0, error=ErrorInfo("internal_error", "this one is bad"))
        if not sequence.needs_token:
            vector = None if sequence.request.pooling is None else b"vector"
            return SampledToken(0, prompt_logprobs=None if vector else (), embedding=vector)
        return SampledToken(next_token(sequence.request.adapter_digest, sequence.token_ids))

    def _assert_written_blocks_are_private(self, batch: Batch) -> None:
        users: dict[int, int] = {}
        for sequence in self.core.scheduler.running:
            for block in sequence.block_table:
                users[block] = users.get(block, 0) + 1
        for item in batch.items:
            for position in range(item.start, item.start + item.num_tokens):
                assert users[self._slot(item.sequence, position)[0]] == 1, "two sequences would write one block"


class Engine:
    """An EngineCore and its fake device, driven step by step under a clock that ticks once per call."""

    def __init__(self, **config: Any) -> None:
        settings = {"num_blocks": 16, "block_size": 4, "max_running": 4, "max_step_tokens": 8} | config
        checkpoint = settings.pop("checkpoint", info())
        self.core = EngineCore(checkpoint, EngineConfig(**settings))
        self.device = FakeDevice(self.core)
        self.now = 0.0
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}

    def add(
        self, request: Request, attempt: int = 1, generated: tuple[int, ...] = (), predicted: float | None = None
    ) -> None:
        self.note(self.core.add(request, attempt, generated, self.tick(), predicted))

    def step(self) -> Batch | None:
        decoding = [s for s in self.core.scheduler.running if s.num_uncomputed == 1]
        scheduler = self.core.scheduler
        num_lost = scheduler.num_preemptions + scheduler.num_displaced
        batch = self.core.schedule(self.tick())
        self.core.check()
        if batch is None:
            return None
        if scheduler.num_preemptions + scheduler.num_displaced == num_lost:
            served = {item.sequence.serial for item in batch.items}
            assert {s.serial for s in decoding} <= served, "a decoding sequence was passed over"
        self.note(self.core.commit(batch, self.device.run(batch), self.tick()))
        self.core.check()
        return batch

    def drain(self) -> None:
        while self.step():
            pass

    def note(self, updates: list[Any]) -> None:
        for update in updates:
            key = f"{update.request_id}#{update.attempt}"
            assert key not in self.ends, f"{key} goes on after its end"
            self.outputs.setdefault(key, []).extend(update.token_ids)
            if update.finish_reason is not None:
                self.ends[key] = update

    def tick(self) -> float:
        self.now += 1.0
        return self.now


def make_request(name: str, prompt: list[int], **fields: Any) -> Request:
    """A greedy request; keywords are fields of SamplingParams or of Request."""
    if fields.get("pooling"):
        fields["max_tokens"] = 0
    sampling = {k: fields.pop(k) for k in list(fields) if k in SamplingParams.__dataclass_fields__}
    params = SamplingParams(**({"max_tokens": 4, "temperature": 0.0} | sampling))
    return Request(RequestId(name), ModelId("m"), tuple(prompt), params, **fields)
