"""`nearline replay`: a journal's digest, or why one request waited, told by the core that decided it."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.config import target_s
from nearline.controller.core import ControllerCore
from nearline.controller.journal import Concern, digest, first_part, read, replay
from nearline.protocol import RequestId, Seconds, WireError

RUNS = "runs"


def story(request_id: RequestId, path: Path) -> Iterator[tuple[Seconds, str]]:
    """Tell what happened to a request, and whenever the reason changed for which it waited; at the end where its time
    went. Raises WireError if the journal's first file is missing."""
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
    for what, seconds in sorted(spent.items(), key=lambda row: -row[1]):
        yield now, f"in all {seconds:.3f} s: {what}"


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
    if request.evicted_at is not None:
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


def main(arguments: list[str]) -> int:
    """Print the digest of a journal's actions, or the story of one request."""
    parser = argparse.ArgumentParser(prog="nearline replay", description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--request", type=RequestId, help="tell what happened to this request, and why it waited")
    options = parser.parse_args(arguments)
    try:
        if options.request is None:
            sys.stdout.write(digest(replay(options.file)) + "\n")
            return 0
        start = None
        for now, text in story(options.request, options.file):
            start = now if start is None else start
            sys.stdout.write(f"{now - start:+10.3f} s  {text}\n")
    except (OSError, WireError) as error:
        sys.stderr.write(f"cannot replay {options.file}: {error}\n")
        return 1
    if options.request is not None and start is None:
        sys.stderr.write(f"{options.file} holds no request {options.request!r}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
