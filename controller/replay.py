"""`nearline replay`: a journal in short, or why one of its requests waited, told by the core that decided it."""

import argparse
import json
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.concern import Concern
from nearline.controller.config import target_s
from nearline.controller.core import ControllerCore
from nearline.controller.journal import digest, first_part, read, replay
from nearline.protocol import RequestId, Seconds, WireError

RUNS = "runs"
NUM_SLOWEST = 5
Step = tuple[Seconds, happened.Event, list[do.Action]]


def story(request_id: RequestId, path: Path) -> Iterator[tuple[Seconds | None, str]]:
    """Tell what happened to a request, and whenever the reason changed for which it waited; at the end, without a time,
    where its time went, in the order in which it did. Raises WireError if the journal's first file is missing."""
    header, events = read(path)
    first_part(path, header)
    core, concern = ControllerCore(header.config), Concern(request_id)
    spent: dict[str, Seconds] = {}
    reason, since, now = "", 0.0, 0.0
    for event, now in events:
        items = concern.of(event, core.on(event, now))
        for item in items:
            yield now, sentence(item)
        found = _reason(core, request_id)
        if found != reason:
            if reason:
                spent[reason] = spent.get(reason, 0.0) + now - since
            reason, since = found, now
            if found and found != RUNS:
                yield now, f"waits: {found}"
    if reason:
        spent[reason] = spent.get(reason, 0.0) + now - since
    for what, seconds in spent.items():
        yield None, f"in all {seconds:.3f} s: {what}"


@dataclass
class Summary:
    """What a replay went through. `waits` are seconds from a request's arrival to its first token, or to the end."""

    num_events: int = 0
    first_at: Seconds | None = None
    last_at: Seconds = 0.0
    waits: dict[RequestId, Seconds] = field(default_factory=dict)
    waiting: dict[RequestId, Seconds] = field(default_factory=dict)

    def watched(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Hand every step on and count it."""
        for now, event, actions in steps:
            self.num_events += 1
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
            match event:
                case happened.RequestArrived(info):
                    self.waiting[info.request_id] = now
                case happened.FirstToken() | happened.SequenceEnded() | happened.RequestCancelled():
                    self._over(event.request_id, now)
            for action in actions:
                if isinstance(action, do.Reject):
                    self._over(action.request_id, now)
            yield now, event, actions

    def _over(self, request_id: RequestId, now: Seconds) -> None:
        if request_id in self.waiting:
            self.waits[request_id] = now - self.waiting.pop(request_id)

    def slowest(self) -> list[tuple[Seconds, RequestId, bool]]:
        """The longest waits first: seconds, request, and whether it still waits when the journal ends."""
        rows = [(seconds, request_id, False) for request_id, seconds in self.waits.items()]
        rows += [(self.last_at - at, request_id, True) for request_id, at in self.waiting.items()]
        return sorted(rows, key=lambda row: (-row[0], row[1]))[:NUM_SLOWEST]


def overview(path: Path) -> dict[str, Any]:
    """Replay all of a journal: what it held, and which of its requests to ask about. Raises WireError."""
    summary = Summary()
    found = digest(summary.watched(replay(path)))
    return {
        "file": str(path),
        "num_events": summary.num_events,
        "seconds": summary.last_at - (summary.first_at or 0.0),
        "num_requests": len(summary.waits) + len(summary.waiting),
        "digest": found,
        "slowest": [{"request": who, "wait_s": s, "still_waits": waits} for s, who, waits in summary.slowest()],
    }


def _lines(seen: dict[str, Any]) -> Iterator[str]:
    yield "replayed  {file}: {num_events} events in {seconds:.1f} s, {num_requests} requests".format_map(seen)
    yield f"digest    {seen['digest']}  (equal digests: the same actions in the same order)"
    if seen["num_requests"]:
        yield "slowest   to the first token or the end; why: --request ID"
    for row in seen["slowest"]:
        yield f"{row['wait_s']:10.3f} s  {row['request']}{'  (still waits)' if row['still_waits'] else ''}"


def sentence(item: happened.Event | do.Action) -> str:
    """One event or action in words."""
    match item:
        case happened.RequestArrived(info):
            size = f"{info.num_prompt_tokens} prompt tokens, at most {info.max_tokens} more"
            due = f"first token due in {target_s(info.slo):g} s"
            return f"arrived for {info.model_id}: class {info.slo.slo_class.value}, tenant {info.tenant}, {size}; {due}"
        case happened.FirstToken(_, attempt):
            return f"first token of attempt {attempt}"
        case happened.SequenceEnded(_, attempt, reason, num_generated):
            return f"attempt {attempt} ended: {reason.value}, {num_generated} tokens"
        case happened.RequestCancelled():
            return "cancelled by its caller"
        case happened.RequestRejected(_, num_generated):
            return f"its caller has got {num_generated} tokens"
        case happened.InstanceChanged(_, status):
            return f"{status.instance_id} is {status.state.value}"
        case do.Dispatch(_, instance_id, _, attempt, reason):
            return f"sent to {instance_id} as attempt {attempt}: {reason}"
        case do.YieldPlace(_, instance_id, _, reason):
            return f"gives its place on {instance_id} away for a while: {reason}"
        case do.EnsureInstance(spec, node_id, estimate_s, reason):
            return f"start of {spec.instance_id} on {node_id}, about {estimate_s:.2f} s: {reason}"
        case do.PrepareAdapter(instance_id, _, digest, reason):
            return f"{instance_id} reads adapter {digest} ahead: {reason}"
        case do.StopInstance(instance_id, _, _, reason):
            return f"stop of {instance_id}: {reason}"
        case do.Reject(_, error, reason):
            return f"refused with {error.code}: {reason} ({error.message})"
        case _:
            return f"{type(item).__name__}: {getattr(item, 'reason', item)}"


def _reason(core: ControllerCore, request_id: RequestId) -> str:
    """Why a request waits now; `RUNS` when it does not, empty when it is over."""
    request = core.fleet.requests.get(request_id)
    if request is None:
        return ""
    model = core.fleet.model_of(request)
    if request.preempted_at is not None:
        return f"it gave its place on {request.instance_id} to a stricter class"
    if request.instance_id is not None:
        return RUNS
    if model.num_live == 0:
        return model.wait_reason or "its model has no instance"
    starting = [i.instance_id for i in model.instances.values() if i.is_live and not i.is_usable]
    if len(starting) == model.num_live:
        return f"{', '.join(starting)} is starting"
    if request.is_late:
        return "it is late, and those go first that can still be in time"
    return "all places of its model's instances are taken, and others go first"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nearline replay", description=main.__doc__)
    parser.add_argument("file", type=Path, help="a journal, <data>/controller/journal/<epoch>.000.journal")
    parser.add_argument("--request", type=RequestId, help="tell what happened to this request, and why it waited")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: list[str]) -> int:
    """Repeat a journal's decisions: what it held and its slowest requests, or the story of one request."""
    options = _parser().parse_args(arguments)
    try:
        if options.request is None:
            seen = overview(options.file)
            sys.stdout.write("\n".join([json.dumps(seen)] if options.json else _lines(seen)) + "\n")
            return 0
        told = list(story(options.request, options.file))
    except OSError as error:
        sys.stderr.write(f"cannot replay {options.file}: {error.strerror}\n")
        return 1
    except WireError as error:
        sys.stderr.write(f"cannot replay {options.file}: {error}\n")
        return 1
    if not told:
        sys.stderr.write(f"{options.file} holds no request {options.request!r}\n")
        return 1
    since = [(None if now is None else now - (told[0][0] or 0.0), text) for now, text in told]
    if options.json:
        sys.stdout.write(json.dumps([{"after_s": after_s, "what": text} for after_s, text in since]) + "\n")
    else:
        for after_s, text in since:
            sys.stdout.write(f"{'' if after_s is None else f'{after_s:+.3f} s':>12}  {text}\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has seen enough: end without a word
    sys.exit(main(sys.argv[1:]))
