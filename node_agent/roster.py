"""Which instances, engine processes and slots there are, and what must hold between them. Pure."""

from collections.abc import Iterator

from nearline.node_agent.budget import instance_budget
from nearline.node_agent.lifecycle import is_final
from nearline.node_agent.types import CoreConfig, DeviceSlots, Engine, EngineId, EngineState, Instance
from nearline.protocol import DeviceInfo, Digest, InstanceId, InstanceState, Seconds
from nearline.protocol.errors import InvalidRequest, ModelNotFound

MAX_ENDED = 256
"""Ended instances remembered, so that a repeated wish is answered and never run twice."""


class Roster:
    """Owns the tables of NodeCore. Order is order of arrival everywhere."""

    def __init__(self, devices: tuple[DeviceInfo, ...]) -> None:
        self.devices = {info.index: DeviceSlots(info) for info in devices}
        self.instances: dict[InstanceId, Instance] = {}
        self.engines: dict[EngineId, Engine] = {}
        self._next_engine = 1

    def add_engine(self, device_index: int, now: Seconds, config: CoreConfig) -> Engine:
        """Enter a process that is about to be started."""
        engine = Engine(EngineId(self._next_engine), device_index, now, deadline=now + config.start_timeout_s)
        self._next_engine += 1
        self.engines[engine.engine_id] = engine
        return engine

    def engine_of(self, instance: Instance) -> Engine:
        """Give the process of an instance that has one."""
        assert instance.engine_id is not None, f"{instance.spec.instance_id} has no process"
        return self.engines[instance.engine_id]

    def instance_of(self, engine: Engine) -> Instance | None:
        return self.instances[engine.instance_id] if engine.instance_id is not None else None

    def hungry(self, device: DeviceSlots) -> list[Instance]:
        """List the instances that hold a slot of the device and wait for a process."""
        return [
            i
            for i in self.instances.values()
            if i.state is InstanceState.STARTING and i.spec.device_index == device.info.index
        ]

    def max_running(self, instance: Instance, config: CoreConfig) -> int:
        """Tell how many sequences an instance may run at once. Raises NearlineError for one that cannot run here."""
        spec, device = instance.spec, self.devices.get(instance.spec.device_index)
        if device is None:
            raise InvalidRequest(f"this node has no device {spec.device_index}; it has {sorted(self.devices)}")
        if instance.checkpoint is None:
            raise ModelNotFound(f"checkpoint {spec.digest} of {spec.model_id} is not in this node's store; import it")
        return instance_budget(instance.checkpoint, device.info, config.kv_bytes, config.max_running).max_running

    def engines_in(self, device: DeviceSlots, state: EngineState) -> list[Engine]:
        return [e for e in self.engines.values() if e.state is state and e.device_index == device.info.index]

    def num_free_slots(self, device: DeviceSlots) -> int:
        used = sum(i.has_slot and i.spec.device_index == device.info.index for i in self.instances.values())
        return device.info.num_slots - used

    def is_in_use(self, digest: Digest) -> bool:
        """Tell whether an instance runs, will run or still maps this checkpoint."""
        using = (i for i in self.instances.values() if i.has_slot or not is_final(i.state))
        return any(i.spec.digest == digest for i in using)

    def deadlines(self) -> Iterator[Seconds]:
        yield from (e.deadline for e in self.engines.values() if e.deadline is not None)
        yield from (i.bytes_deadline for i in self.instances.values() if i.bytes_deadline is not None)
        yield from (i.drain_deadline for i in self.instances.values() if i.drain_deadline is not None)

    def forget_old(self) -> None:
        """Drop the oldest ended instances beyond MAX_ENDED, except those whose process is not gone yet."""
        ended = [i.spec.instance_id for i in self.instances.values() if is_final(i.state) and not i.has_slot]
        for instance_id in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self.instances[instance_id]

    def check(self) -> None:
        """Assert what must hold between instances, processes and slots."""
        for device in self.devices.values():
            assert self.num_free_slots(device) >= 0, f"device {device.info.index} runs more instances than slots"
        for engine in self.engines.values():
            instance = self.instance_of(engine)
            is_taken = engine.state in (EngineState.BINDING, EngineState.BOUND, EngineState.UNBINDING)
            assert instance is not None or not is_taken, f"engine {engine.engine_id} is {engine.state} for nobody"
            assert instance is None or instance.engine_id == engine.engine_id
            assert instance is None or engine.state not in (EngineState.STARTING, EngineState.IDLE)
        for instance in self.instances.values():
            self._check_instance(instance)

    def _check_instance(self, instance: Instance) -> None:
        engine = self.engines[instance.engine_id] if instance.engine_id is not None else None
        state = instance.state
        assert engine is None or engine.instance_id == instance.spec.instance_id
        assert engine is None or instance.has_slot, "a process without a slot"
        assert instance.is_pinned or not instance.has_frames
        is_awaited = state is InstanceState.STARTING and not instance.has_frames
        assert (instance.bytes_deadline is not None) == is_awaited, "it waits for bytes without an end, or for none"
        assert not instance.is_pinned or instance.has_slot, "a pin without a slot"
        if state is InstanceState.PENDING:
            assert not instance.has_slot
        elif state is InstanceState.STARTING:
            assert instance.has_slot
            assert engine is None
        elif state is InstanceState.LOADING:
            assert engine is not None
            assert engine.state is EngineState.BINDING
        elif state is InstanceState.READY:
            assert engine is not None
            assert engine.state is EngineState.BOUND
        elif state is InstanceState.DRAINING:
            assert engine is not None, "a draining instance waits for its process"
        elif instance.has_slot:
            assert engine is not None
            assert engine.state is EngineState.EXITING, "an ended instance keeps its slot"
