"""An EngineCore in virtual time: steps last as long as a law says, tokens are made up, jobs come and are served."""

from dataclasses import dataclass, field
from typing import Any

from nearline.engine import EngineConfig, EngineCore, SampledToken
from nearline.protocol import Slo, StepTimeModel
from tests.engine.fake_engine import info, make_request

LAW = StepTimeModel(
    prefill_base_s=0.006, prefill_per_token_s=3e-4, prefill_per_square_s=2e-8,
    decode_base_s=0.006, decode_per_context_s=4e-7, decode_per_sequence_s=7e-4,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A request: when it comes, how long it is, how long it was predicted to become."""

    name: str
    at: float
    num_prompt: int
    num_output: int
    predicted: float | None = None
    tpot_s: float | None = None
    priority: int = 0


@dataclass(slots=True)
class Served:
    """When a job's tokens came."""

    at: float
    tokens: list[float] = field(default_factory=list)

    @property
    def wait_s(self) -> float:
        return self.tokens[0] - self.at

    @property
    def total_s(self) -> float:
        return self.tokens[-1] - self.at

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)), default=0.0)


class TimedEngine:
    """`law` is what steps really take; the engine believes `believed` at first (None: it guesses) and learns."""

    def __init__(self, law: StepTimeModel = LAW, believed: StepTimeModel | None = LAW, **config: Any) -> None:
        settings: dict[str, Any] = {"num_blocks": 4096, "max_running": 8, "step_time": believed}
        self.core = EngineCore(info(max_context_tokens=8192, num_bytes=270_000_000), EngineConfig(**settings | config))
        self.law = law
        self.now = 0.0
        self.steps: list[Any] = []

    def run(self, *jobs: Job) -> dict[str, Served]:
        """Serve the jobs to their ends."""
        coming = sorted(jobs, key=lambda job: job.at)
        served = {job.name: Served(job.at) for job in jobs}
        while True:
            while coming and coming[0].at <= self.now:
                self._add(coming.pop(0))
            batch = self.core.schedule(self.now)
            if batch is None:
                if not coming:
                    return served
                self.now = coming[0].at
                continue
            seconds = self.law.step_s(batch.work)
            self.now += seconds
            self.steps.append((self.now, seconds, batch))
            self.core.measured(batch, seconds)
            outcomes = [SampledToken(1) for item in batch.items if item.is_sampled]
            for update in self.core.commit(batch, outcomes, self.now):
                assert update.error is None
                served[update.request_id].tokens += [self.now] * len(update.token_ids)
            if len(self.steps) % 50 == 0:
                self.core.check()

    def _add(self, job: Job) -> None:
        base = sum(job.name.encode())
        prompt = [1 + (base * 31 + i) % 47 for i in range(job.num_prompt)]
        fields = {"max_tokens": job.num_output, "ignore_eos": True, "slo": Slo(tpot_s=job.tpot_s)}
        request = make_request(job.name, prompt, priority=job.priority, salt=job.name, **fields)
        assert self.core.add(request, 1, (), job.at, job.predicted) == []
