"""What a live run's journal says: when requests came and were answered, which starts there were, and their costs."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from nearline.controller import CoreConfig, Event
from nearline.controller.events import (
    FirstToken,
    InstanceChanged,
    ModelAdded,
    NodeReported,
    RequestArrived,
    RequestInfo,
    SequenceEnded,
)
from nearline.controller.journal import read
from nearline.protocol import (
    InstanceId,
    InstanceState,
    InstanceStatus,
    ModelId,
    ModelSpec,
    NodeReport,
    StepProfile,
    from_plain,
    to_plain,
)
from nearline.simulator.report import summary

BESIDE = "calibration.json"
SIX = 6
"""How many requests of one model the warm-up sends at once."""


@dataclass
class Answer:
    """One request as the controller saw it; instants are of its clock."""

    info: RequestInfo
    arrived_at: float
    first_at: float = 0.0
    ended_at: float = 0.0
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived_at

    @property
    def token_s(self) -> float:
        return (self.ended_at - self.first_at) / max(1, self.num_tokens - 1)


@dataclass
class Start:
    """One start: when the slot was granted, when a step was possible, and when a stop was wished."""

    model_id: ModelId
    status: InstanceStatus
    loading_at: float
    ready_at: float = 0.0
    draining_at: float | None = None


@dataclass(frozen=True)
class Timing:
    """What became of one request of the load. What it met, a start or others under way, is known of live ones."""

    ttft_s: float
    e2e_s: float
    token_s: float | None
    is_cold: bool = False
    is_beside: bool = False


@dataclass(frozen=True)
class Run:
    """The load on one side, in order of arrival; `models` were started in this order, the first one before the load."""

    timings: list[Timing]
    models: list[ModelId]

    def measured(self) -> dict[str, float]:
        """What is compared."""
        return {
            **summary([timing.ttft_s for timing in self.timings]),
            "e2e": fmean(timing.e2e_s for timing in self.timings),
            "tpot": fmean(timing.token_s for timing in self.timings if timing.token_s is not None),
            "starts": len(self.models) - 1,
            "swaps": sum(a != b for a, b in pairwise(self.models)),
        }


@dataclass
class Lived:
    """A live run. Requests that arrived before `begun_at` are the warm-up."""

    config: CoreConfig
    specs: dict[ModelId, ModelSpec]
    profiles: dict[str, StepProfile]
    begun_at: float
    report: NodeReport
    answers: list[Answer] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    others: tuple[float, ...] = (0.0, 0.0)
    """The part of the machine that other processes used during profiles and warm-up, and during the load."""

    @property
    def load_s(self) -> float:
        return max(answer.arrived_at for answer in self.load()) - self.begun_at

    def load(self) -> list[Answer]:
        found = [answer for answer in self.answers if answer.arrived_at >= self.begun_at]
        return sorted(found, key=lambda answer: answer.arrived_at)

    def warm_up(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.arrived_at < self.begun_at]

    def run(self) -> Run:
        before = [start.model_id for start in self.starts if start.loading_at < self.begun_at]
        models = [start.model_id for start in self.starts if start.loading_at >= self.begun_at]
        return Run([self._timing(answer) for answer in self.load()], [*before[-1:], *models])

    def _timing(self, answer: Answer) -> Timing:
        token_s = answer.token_s if answer.num_tokens > 1 else None
        is_beside = any(b is not answer and b.arrived_at < answer.arrived_at < b.ended_at for b in self.answers)
        is_cold = self.start_of(answer) is not None
        return Timing(answer.ttft_s, answer.ended_at - answer.arrived_at, token_s, is_cold, is_beside)

    def start_of(self, answer: Answer) -> Start | None:
        """The start that a request waited for, if any."""
        starts = (start for start in self.starts if start.model_id == answer.info.model_id)
        return next((s for s in starts if answer.arrived_at <= s.loading_at <= answer.first_at), None)

    def last_end(self, before: float) -> float | None:
        """When a request was last under way."""
        return max((answer.ended_at for answer in self.answers if answer.ended_at < before), default=None)

    def first_rest_s(self, answer: Answer) -> float | None:
        """How long its instance had had no work before this request, if for the first time so long as a second."""
        starts = [start for start in self.starts if start.ready_at and start.ready_at < answer.arrived_at]
        if not starts or starts[-1].model_id != answer.info.model_id:
            return None
        since = starts[-1].ready_at
        own = [a for a in self.answers if a.info.model_id == answer.info.model_id and a.ended_at > since]
        for one in sorted(own, key=lambda a: a.arrived_at):
            if one.arrived_at - since >= 1.0:
                return answer.arrived_at - since if one is answer else None
            since = max(since, one.ended_at)
        return None

    def bind_s(self, model_id: ModelId) -> float:
        """From the grant of a slot to the first possible step, of a start from DRAM by a warm process."""
        times = [s.ready_at - s.loading_at for s in self.starts
                 if s.model_id == model_id and s.ready_at and s.loading_at < self.begun_at]  # fmt: skip
        return median(times)


def keep(directory: Path, profiles: dict[str, StepProfile], begun_at: float, others: list[float]) -> None:
    """Put beside the journal what it does not say, so that `read_lived` needs nothing else."""
    plain = {name: to_plain(profile) for name, profile in profiles.items()}
    beside = {"begun_at": begun_at, "others": others, "profiles": plain}
    (directory / BESIDE).write_text(json.dumps(beside, indent=1) + "\n")


def read_lived(directory: Path) -> Lived:
    """Read the only series of a journal directory, and what `keep` put beside it."""
    beside = json.loads((directory / BESIDE).read_text())
    profiles = {name: from_plain(StepProfile, profile) for name, profile in beside["profiles"].items()}
    files = sorted(directory.glob("*.journal"))
    header, _ = read(files[0])
    events = (each for file in files for each in read(file)[1])
    lived = lived_of(header.config, events, profiles, beside["begun_at"])
    return replace(lived, others=tuple(beside["others"]))


def lived_of(
    config: CoreConfig, events: Iterable[tuple[Event, float]], profiles: dict[str, StepProfile], begun_at: float
) -> Lived:
    """Follow what the controller's core was told, and when."""
    answers: dict[str, Answer] = {}
    starts: dict[InstanceId, Start] = {}
    specs: dict[ModelId, ModelSpec] = {}
    report: NodeReport | None = None
    for event, now in events:
        match event:
            case ModelAdded(spec):
                specs[spec.model_id] = spec
            case RequestArrived(info):
                answers[info.request_id] = Answer(info, now)
            case FirstToken(request_id) if request_id in answers:
                answer = answers[request_id]
                answer.first_at = answer.first_at or now
            case SequenceEnded(request_id, _, _, num_generated) if request_id in answers:
                answers[request_id].ended_at, answers[request_id].num_tokens = now, num_generated
            case NodeReported(found) if now < begun_at:
                report = found
            case InstanceChanged(_, status):
                _follow(starts, status, now)
            case _:
                pass
    assert report is not None, "a node never reported"
    done = [a for a in answers.values() if a.first_at and a.ended_at and a.num_tokens > 1]  # not a profile's own calls
    return Lived(config, specs, profiles, begun_at, report, done, list(starts.values()))


def _follow(starts: dict[InstanceId, Start], status: InstanceStatus, now: float) -> None:
    start = starts.get(status.instance_id)
    if start is None:
        if status.state in (InstanceState.STOPPED, InstanceState.FAILED):
            return
        start = starts[status.instance_id] = Start(status.model_id, status, now)
    start.status = status
    if status.state is InstanceState.READY and not start.ready_at:
        start.ready_at = now
    if status.state is InstanceState.DRAINING and start.draining_at is None:
        start.draining_at = now
