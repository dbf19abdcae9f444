"""Which sequences run in which instance, so that each hears exactly one end. Pure."""

from nearline.protocol import InstanceId, RequestId, SequenceUpdate


class SequenceTable:
    """Remembers dispatches from Submit to the update that ends them. What it does not know is not passed on."""

    def __init__(self) -> None:
        self._attempts: dict[InstanceId, dict[RequestId, int]] = {}

    def add(self, instance_id: InstanceId, request_id: RequestId, attempt: int) -> bool:
        """Enter a dispatch; tell whether it replaces an earlier attempt in the same instance."""
        running = self._attempts.setdefault(instance_id, {})
        is_known = request_id in running
        running[request_id] = attempt
        return is_known

    def passing(self, instance_id: InstanceId, updates: tuple[SequenceUpdate, ...]) -> tuple[SequenceUpdate, ...]:
        """Select the updates of known attempts, and forget those that end."""
        running = self._attempts.get(instance_id, {})
        known = tuple(u for u in updates if running.get(u.request_id) == u.attempt)
        for update in known:
            if update.finish_reason is not None:
                running.pop(update.request_id, None)
        return known

    def has(self, instance_id: InstanceId, request_id: RequestId) -> bool:
        return request_id in self._attempts.get(instance_id, {})

    def remove(self, instance_id: InstanceId, request_id: RequestId) -> bool:
        """Forget one sequence; tell whether it was there."""
        return self._attempts.get(instance_id, {}).pop(request_id, None) is not None

    def take(self, instance_id: InstanceId) -> list[tuple[RequestId, int]]:
        """Forget and return all (request_id, attempt) of an instance."""
        return list(self._attempts.pop(instance_id, {}).items())

    def instances(self) -> list[InstanceId]:
        """Name the instances that run something."""
        return [instance_id for instance_id, running in self._attempts.items() if running]

    def is_empty(self, instance_id: InstanceId) -> bool:
        return not self._attempts.get(instance_id)
