"""What a live run's journal says: when requests came and were answered, which starts there were, and their costs."""

import pickle
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from nearline.controller import CoreConfig
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
from nearline.protocol import InstanceId, InstanceState, InstanceStatus, ModelId, ModelSpec, NodeReport, StepProfile
from nearline.simulator.report import summary


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
    """One start: when the slot was granted, what it cost, and how long its stop took when nothing ran."""

    model_id: ModelId
    status: InstanceStatus
    loading_at: float
    ready_at: float = 0.0
    draining_at: float | None = None
    stopped_at: float | None = None


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

    @property
    def num_requests(self) -> int:
        return len(self.load())

    def load(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.arrived_at >= self.begun_at]

    def warm_up(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.arrived_at < self.begun_at]

    def measured(self) -> dict[str, float]:
        """What is compared."""
        answers, before = self.load(), [s for s in self.starts if s.loading_at < self.begun_at]
        starts = [start for start in self.starts if start.loading_at >= self.begun_at]
        models = [start.model_id for start in (*before[-1:], *starts)]
        return {
            **summary([answer.ttft_s for answer in answers]),
            "e2e": fmean(answer.ended_at - answer.arrived_at for answer in answers),
            "tpot": fmean(answer.token_s for answer in answers if answer.num_tokens > 1),
            "starts": len(starts),
            "swaps": sum(a != b for a, b in pairwise(models)),
        }

    def described(self) -> dict[str, str]:
        rows = {}
        for name, profile in self.profiles.items():
            model = profile.model
            text = f"prefill {1e3 * model.prefill_base_s:.1f} ms + {1e6 * model.prefill_per_token_s:.0f} µs per token, "
            text += (
                f"decode {1e3 * model.decode_base_s:.1f} ms + {1e3 * model.decode_per_sequence_s:.2f} ms per sequence"
            )
            rows[name] = f"{text}; bind {1e3 * self.bind_s(ModelId(name)):.0f} ms"
        return rows

    def bind_s(self, model_id: ModelId) -> float:
        """From the grant of a slot to the first possible step, of a start from DRAM by a warm process."""
        times = [s.ready_at - s.loading_at for s in self.starts if s.model_id == model_id and s.ready_at]
        return median(times)

    def stop_s(self) -> float:
        """From the wish to stop an idle instance to its end."""
        times = [s.stopped_at - s.draining_at for s in self.starts if s.stopped_at and s.draining_at]
        return median(times) if times else 0.05

    def save(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def kept(path: Path) -> "Lived":
        found: Lived = pickle.loads(path.read_bytes())
        return found


def read_lived(directory: Path, profiles: dict[str, StepProfile], begun_at: float) -> Lived:
    """Read the only series of a journal directory."""
    files = sorted(directory.glob("*.journal"))
    header, _ = read(files[0])
    answers: dict[str, Answer] = {}
    starts: dict[InstanceId, Start] = {}
    specs: dict[ModelId, ModelSpec] = {}
    report: NodeReport | None = None
    for file in files:
        for event, now in read(file)[1]:
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
                case NodeReported(found):
                    report = found
                case InstanceChanged(_, status):
                    _follow(starts, status, now)
                case _:
                    pass
    assert report is not None, "a node never reported"
    done = [a for a in answers.values() if a.first_at and a.ended_at and a.num_tokens > 1]  # not a profile's own calls
    return Lived(header.config, specs, profiles, begun_at, report, done, list(starts.values()))


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
    if status.state is InstanceState.STOPPED and start.stopped_at is None:
        start.stopped_at = now
