"""The engine processes of this node, by id: started, spoken to, ended, all gone when the agent goes."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

import structlog

from nearline.node_agent.config import Hardware, NodeConfig
from nearline.node_agent.engine_process import EngineProcess, Launch
from nearline.node_agent.types import EngineId
from nearline.node_agent.watched import watched
from nearline.protocol.frames import PoolLayout

_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "API_KEY")
log = structlog.get_logger()


class Supervisor:
    """Owns every engine process. `on_frame(engine_id, message)` hears frames, `on_exit(engine_id, how)` each end."""

    def __init__(
        self,
        launches: dict[int, Launch],
        on_frame: Callable[[EngineId, object], None],
        on_exit: Callable[[EngineId, str], None],
    ) -> None:
        self._launches = launches
        self._on_frame = on_frame
        self._on_exit = on_exit
        self._processes: dict[EngineId, EngineProcess] = {}
        self._tasks: dict[EngineId, asyncio.Task[None]] = {}

    def start(self, engine_id: EngineId, device_index: int) -> None:
        """Start a process for a device; on_exit follows sooner or later, whatever happens."""
        process = EngineProcess(engine_id, self._launches[device_index], self._on_frame)
        self._processes[engine_id] = process
        self._tasks[engine_id] = watched(self._run(engine_id, process), f"engine-{engine_id}")

    def send(self, engine_id: EngineId, message: object) -> None:
        """Send a frame to a process; one that is gone already does not mind."""
        process = self._processes.get(engine_id)
        if process:
            process.send(message)

    def kill(self, engine_id: EngineId) -> None:
        process = self._processes.get(engine_id)
        if process:
            process.kill()

    def kill_hung(self, engine_id: EngineId, cause: str) -> None:
        process = self._processes.get(engine_id)
        if process:
            process.kill_hung(cause)

    async def close(self) -> None:
        """End all processes and wait until they are reaped."""
        tasks = list(self._tasks.values())
        for engine_id in list(self._processes):
            self.kill(engine_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, engine_id: EngineId, process: EngineProcess) -> None:
        try:
            how = await process.run()
        except Exception as error:  # a defect here must not leave the mind waiting for an end that came
            log.exception("engine supervision failed", engine_id=engine_id)
            how = f"supervision failed: {error}"
        del self._processes[engine_id], self._tasks[engine_id]
        log.info("engine ended", engine_id=engine_id, how=how)
        self._on_exit(engine_id, how)


def launches(
    config: NodeConfig, hardware: Hardware, pool_fd: int, ready_fd: int, layout: PoolLayout
) -> dict[int, Launch]:
    """Describe how engines are started on each device."""
    environment = engine_environment(hardware.num_cores)
    command = (*config.engine_command, *config.engine_options)
    base = Launch(command, environment, pool_fd, ready_fd, layout, config.data_dir / "logs")
    return {
        index: replace(base, environment=environment | {"CUDA_VISIBLE_DEVICES": device.visible_as})
        for index, device in enumerate(hardware.devices)
    }


def engine_environment(num_cores: int) -> dict[str, str]:
    """Make the environment of engine processes: ours without secrets, with thread pools that do not spin.

    Several processes share the cores, and a spinning OpenMP pool beside a busy process slows a step many times over.
    """
    inherited = {name: value for name, value in os.environ.items() if not any(s in name.upper() for s in _SECRETS)}
    return inherited | {
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "OMP_NUM_THREADS": str(num_cores),
        "MALLOC_ARENA_MAX": "2",
        "PYTHONUNBUFFERED": "1",
    }
