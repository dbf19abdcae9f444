"""The life of a request: held, dispatched, lost and dispatched again, ended exactly once. Pure."""

from nearline.controller.actions import AbortSequence, Reject
from nearline.controller.agenda import Agenda
from nearline.controller.config import CoreConfig
from nearline.controller.estimate import generated_tokens, retry_after_s, start_s
from nearline.controller.events import RequestInfo, SequenceEnded
from nearline.controller.policy import admission
from nearline.controller.policy.prediction import bucket_of
from nearline.controller.policy.scaling import is_beside_replica
from nearline.controller.policy.waiting import MIN_ANSWERS, Wait
from nearline.controller.queues import RequestRecord, VirtualQueue
from nearline.controller.state import Fleet, InstanceRecord, ModelRecord
from nearline.protocol import FinishReason, RequestId, Seconds
from nearline.protocol.errors import (
    ERRORS,
    CheckpointUnreadable,
    DeadlineExceeded,
    ErrorInfo,
    InstanceFailed,
    InvalidRequest,
    NearlineError,
    StartTimeout,
)

_SERVICE_WEIGHT = 0.1


class RequestDesk:
    """Owns every RequestRecord. A request is in one group or in one instance's `in_flight`, until it ends."""

    def __init__(self, fleet: Fleet, config: CoreConfig, agenda: Agenda) -> None:
        self._fleet = fleet
        self._config = config
        self._agenda = agenda
        self._num_arrivals = 0
        self._unsettled: dict[RequestId, tuple[RequestRecord, VirtualQueue]] = {}
        """Rejected after they had run: their callers know how many tokens they got, and will say so."""

    def arrived(self, info: RequestInfo, now: Seconds) -> None:
        """Hold a request for its model's current version, or reject it."""
        fleet = self._fleet
        if info.request_id in fleet.requests:
            return
        model = fleet.current_model(info.model_id)
        adapter = None if info.adapter_id is None else fleet.adapters.get(info.adapter_id)
        error = admission.refusal(info, model, adapter, fleet.num_waiting, self._config)
        if model is None:
            self._refuse(info.request_id, error or ErrorInfo.of(NearlineError("request refused")))
            return
        request = RequestRecord(info, model.digest, self._num_arrivals + 1, now, now)
        request.predicted_tokens = model.lengths.predict(request.features)
        request.length_bucket = bucket_of(request.predicted_tokens)
        error = error or self._broken_promise(request, model, now)
        if error is not None:
            fleet.promises.refused(request)
            self._refuse(info.request_id, error)
            return
        self._num_arrivals += 1
        model.demand.note(now)
        if model.quiet_since is not None:
            model.gaps.note(now - model.quiet_since)
            model.quiet_since = None
        fleet.add_request(request)
        if info.adapter_digest is not None:
            model.traffic.note(info.adapter_digest, now)
        self._hold(request, model, now)

    def _refuse(self, request_id: RequestId, error: ErrorInfo) -> None:
        self._agenda.do(Reject(request_id, error, f"not admitted: {error.code}"))

    def _broken_promise(self, request: RequestRecord, model: ModelRecord, now: Seconds) -> ErrorInfo | None:
        """Estimate the request's wait, and say so if its target or its deadline is out of reach already."""
        places, waits = model.num_places, model.waits
        raw = waits.estimate(model.queue.ahead_of(request), model.num_running, places) if places else None
        request.raw_wait = raw
        wait = None if raw is None else waits.calibrated(raw)
        if request.deadline is not None and waits.num_answers >= MIN_ANSWERS:
            begin = wait or Wait(start_s(model, self._fleet.nodes.values(), now), 0.0)
            end = begin.then(waits.service(request.length_bucket))
            return admission.unattainable(request.info, end, self._config)
        if wait is None or not model.queue.num_waiting or waits.num_answers < MIN_ANSWERS:
            return None  # nobody waits: whatever it takes, it takes by itself; and a guess refuses nobody
        return admission.too_late(request.info, wait, self._config)

    def cancelled(self, request_id: RequestId, num_generated: int, now: Seconds) -> None:
        """End a request that nobody waits for any more; its place is free at once."""
        request = self._fleet.requests.get(request_id)
        if request is None:
            self.rejected(request_id, num_generated)  # both at once: its caller will say nothing more
            return
        self._fleet.model_of(request).queue.settle(request, num_generated)
        self._fleet.promises.given_up(request, now)
        self._abort(request, "cancelled by the caller")
        self._end(request, now)

    def rejected(self, request_id: RequestId, num_generated: int) -> None:
        """Correct what the tenant of a rejected request was charged."""
        if request_id in self._unsettled:
            request, queue = self._unsettled.pop(request_id)
            queue.settle(request, num_generated)

    def first_token(self, request_id: RequestId, attempt: int, now: Seconds) -> None:
        request = self._running(request_id, attempt)
        if request is None or request.instance_id is None:
            return
        request.has_token = True
        request.num_fruitless = 0
        model = self._fleet.model_of(request)
        loaded_at = self._fleet.instances[request.instance_id].loaded_at
        if model.num_running <= model.num_places and loaded_at is not None and loaded_at <= request.dispatched_at:
            model.resume.note(request.info.num_prompt_tokens + request.num_kept, now - request.dispatched_at)
        if request.first_token_at is None:
            request.first_token_at = now
            if model.spec.max_replicas > 1:
                request.is_beside_replica = is_beside_replica(self._fleet.instances[request.instance_id])
            if request.is_late:
                request.set_late(False)
            if request.raw_wait is not None and request.attempt == 1:
                model.waits.observed(request.raw_wait, now - request.arrived_at)
            if model.num_running <= model.num_places:
                model.waits.began(now - request.dispatched_at)
        if model.queue.num_waiting or request.num_kept:  # an instance takes a suspect, or one with tokens, at a time
            self._agenda.touch(model)

    def sequence_ended(self, event: SequenceEnded, now: Seconds) -> None:
        """End the request, or hold it again if its end was the instance's fault. Stale attempts change nothing."""
        request = self._running(event.request_id, event.attempt)
        if request is None or request.instance_id is None:
            self.rejected(event.request_id, event.num_generated)
            return
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            model, held_s = self._fleet.model_of(request), request.held_s + now - request.dispatched_at
            model.service_s += _SERVICE_WEIGHT * (held_s - model.service_s)
            model.queue.settle(request, event.num_generated)
            if request.info.max_tokens > 0:  # a prompt that is only read says nothing about answers
                model.lengths.learn(request.features, request.predicted_tokens, event.num_generated)
            if not request.num_losses:
                model.waits.finished(request.length_bucket, event.num_generated, held_s)
            if request.attempt == 1 and model.spec.max_replicas > 1 and event.num_generated > 1:
                self._note_pace(request, event.num_generated, now)
            self._fleet.promises.ended(request, event.num_generated, now)
            self._end(request, now)
            return
        instance = self._fleet.instances[request.instance_id]
        error = event.error or ErrorInfo.of(InstanceFailed("the engine ended the sequence without saying why"))
        if event.finish_reason is FinishReason.ERROR and not (instance.is_stopping or _is_passing(error)):
            self._reject(request, error, "the engine failed this request", now)
        else:
            instance.is_doubtful = True
            is_blamed = not instance.is_stopping and error.code != ERRORS[CheckpointUnreadable].code
            self._lost(request, is_blamed, error, now)

    def _note_pace(self, request: RequestRecord, num_tokens: int, now: Seconds) -> None:
        """Learn how fast a model's sequences are beside a busy replica on their device, and without anybody."""
        if request.first_token_at is None or request.instance_id is None or request.num_preemptions:
            return
        instance = self._fleet.instances[request.instance_id]
        is_shared = is_beside_replica(instance)
        if is_shared is not None and is_shared == request.is_beside_replica:
            pace_s = (now - request.first_token_at) / (num_tokens - 1)
            instance.model.sharing.note(pace_s, len(instance.in_flight) - instance.num_preempted, is_shared)

    def expired(self, request_id: RequestId, now: Seconds) -> None:
        """End a request whose deadline has passed, or that waited too long for an instance."""
        request = self._fleet.requests.get(request_id)
        if request is None:
            return
        model, deadline = self._fleet.model_of(request), request.deadline
        if deadline is not None and now >= deadline:
            done = f"after {now - request.arrived_at:.1f} s ({'running' if request.instance_id else 'waiting'})"
            error = ErrorInfo.of(DeadlineExceeded(f"the request's deadline passed {done}; allow more time"))
            self._abort(request, "deadline passed")
            self._reject(request, error, "deadline passed", now)
        elif request.instance_id is None and now >= request.queued_at + self._config.start_timeout_s:
            text = (
                f"no instance of {model.spec.model_id!r} could take the request in {self._config.start_timeout_s:g} s"
            )
            text += f" ({model.wait_reason})" if model.wait_reason else ""
            error = ErrorInfo.of(StartTimeout(text, retry_after_s=retry_after_s(model)))
            self._reject(request, error, "waited too long for an instance", now)
        else:
            self._set_timer(request)

    def instance_lost(self, instance: InstanceRecord, is_crash: bool, error: ErrorInfo | None, now: Seconds) -> None:
        """Hold everything that ran on an instance again: it died (`is_crash`), or its link or its slot is gone."""
        cause = error or ErrorInfo.of(InstanceFailed(f"instance {instance.instance_id} stopped"))
        for request in sorted(instance.in_flight.values(), key=lambda request: request.order):
            self._lost(request, is_crash, cause, now)

    def reject_waiting(self, model: ModelRecord, error: ErrorInfo, reason: str, now: Seconds) -> None:
        for request in model.queue.requests():
            self._reject(request, error, reason, now)

    def sent(self, request: RequestRecord, instance: InstanceRecord, now: Seconds) -> None:
        """Note that a waiting request is being dispatched to an instance."""
        instance.model.queue.remove(request)
        instance.model.queue.charge(request)
        self._fleet.num_waiting -= 1
        request.attempt += 1
        request.instance_id, request.dispatched_at, request.has_token = instance.instance_id, now, False
        instance.in_flight[request.info.request_id] = request
        instance.model.num_running += 1
        instance.idle_since = None
        instance.has_worked = True
        instance.remember(request)
        self._set_timer(request)

    def withdrawn(self, request: RequestRecord, now: Seconds) -> None:
        """Hold a dispatched request again, as one that waits: it lost nothing and blames nobody."""
        self._keep_tokens(request, now)
        self._leave_instance(request, now)
        self._hold(request, self._fleet.model_of(request), now)

    def _keep_tokens(self, request: RequestRecord, now: Seconds) -> None:
        """Note what an attempt that ends early leaves: about how many tokens, after how long in a place."""
        if request.has_token:
            request.num_kept = generated_tokens(request, self._fleet.model_of(request).waits.token_s or 0.0, now)
            request.held_s += (now if request.preempted_at is None else request.preempted_at) - request.dispatched_at

    def _lost(self, request: RequestRecord, is_crash: bool, cause: ErrorInfo, now: Seconds) -> None:
        self._keep_tokens(request, now)
        self._leave_instance(request, now)
        request.num_losses += 1
        if is_crash and not request.has_token:
            request.num_fruitless += 1
        model = self._fleet.model_of(request)
        if request.num_fruitless >= self._config.max_fruitless_losses:
            text = f"{request.num_fruitless} instances in a row died before this request's next token: {cause.message}"
            self._reject(request, ErrorInfo.of(InstanceFailed(text)), "the request itself seems to be the cause", now)
        elif request.num_losses >= self._config.max_losses:
            text = f"the request lost its instance {request.num_losses} times: {cause.message}"
            self._reject(request, ErrorInfo.of(InstanceFailed(text)), "lost too often", now)
        else:
            request.queued_at = now
            self._hold(request, model, now)

    def _hold(self, request: RequestRecord, model: ModelRecord, now: Seconds) -> None:
        model.queue.push(request)
        self._fleet.num_waiting += 1
        model.refresh(now)
        self._set_timer(request)
        self._agenda.touch(model)

    def _reject(self, request: RequestRecord, error: ErrorInfo, reason: str, now: Seconds) -> None:
        self._fleet.promises.refused(request)
        if request.charged_tokens is not None:
            self._unsettled[request.info.request_id] = (request, self._fleet.model_of(request).queue)
        self._agenda.do(Reject(request.info.request_id, error, reason))
        self._end(request, now)

    def _end(self, request: RequestRecord, now: Seconds) -> None:
        model = self._fleet.model_of(request)
        if request.instance_id is not None:
            self._leave_instance(request, now)
        elif model.queue.has(request):
            model.queue.remove(request)
            self._fleet.num_waiting -= 1
        if not model.num_running and not model.queue.num_waiting:
            model.quiet_since, model.preloading_on = now, None
        self._fleet.drop_request(request)
        self._agenda.timers.drop(("request", request.info.request_id))
        model.refresh(now)
        self._agenda.touch(model)

    def _leave_instance(self, request: RequestRecord, now: Seconds) -> None:
        if request.instance_id is None:
            return
        model = self._fleet.model_of(request)
        instance = model.instances[request.instance_id]
        del instance.in_flight[request.info.request_id]
        model.num_running -= 1
        request.instance_id = None
        if request.preempted_at is not None:
            request.preempted_at = None
            instance.num_preempted -= 1
        self._agenda.touch(model)
        if not instance.in_flight:
            instance.idle_since = now
            self._agenda.is_plan_due = True

    def _abort(self, request: RequestRecord, reason: str) -> None:
        if request.instance_id is not None:
            instance = self._fleet.instances[request.instance_id]
            args = (request.info.request_id, instance.instance_id, instance.node.node_id)
            self._agenda.do(AbortSequence(*args, reason))

    def _running(self, request_id: RequestId, attempt: int) -> RequestRecord | None:
        request = self._fleet.requests.get(request_id)
        return request if request and request.instance_id and request.attempt == attempt else None

    def _set_timer(self, request: RequestRecord) -> None:
        limits = [request.deadline] if request.deadline is not None else []
        if request.instance_id is None:
            limits.append(request.queued_at + self._config.start_timeout_s)
        key = ("request", request.info.request_id)
        if limits:
            self._agenda.timers.set(key, min(limits))
        else:
            self._agenda.timers.drop(key)


def _is_passing(error: ErrorInfo) -> bool:
    """Whether another instance may do better: the fault lies with this one, not with the request."""
    kind = type(error.exception())
    return ERRORS[kind].is_retryable and not issubclass(kind, InvalidRequest)
