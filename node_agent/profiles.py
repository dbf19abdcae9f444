"""What steps of this node's checkpoints were measured to take: kept beside the store, and measured anew on wish."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import structlog

from nearline.node_agent.types import EngineId
from nearline.protocol import Digest, StepProfile, TaskId, from_plain, to_plain
from nearline.protocol.errors import ErrorInfo, InstanceFailed, NearlineError, Overloaded
from nearline.protocol.frames import CancelTask, ProfileFinished, ProfileInstance, ProfileProgress, TaskFailed

log = structlog.get_logger()


class Profiles:
    """Owns one small JSON file per profiled checkpoint. What cannot be read is as if it had never been measured."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._profiles: dict[Digest, StepProfile] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(directory.glob("*.json")):
            try:
                profile = from_plain(StepProfile, json.loads(path.read_text()))
            except (OSError, ValueError, TypeError, NearlineError) as error:
                log.warning("a profile cannot be read; measure it again", path=str(path), error=str(error))
                continue
            self._profiles[profile.digest] = profile

    def of(self, digest: Digest) -> StepProfile | None:
        return self._profiles.get(digest)

    def all(self) -> tuple[StepProfile, ...]:
        return tuple(self._profiles.values())

    def keep(self, profile: StepProfile) -> None:
        """Replace what was known of a checkpoint, on disk too; a full disk takes nothing from it until a restart."""
        self._profiles[profile.digest] = profile
        path = self._directory / f"{profile.digest}.json"
        fresh = path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(to_plain(profile), indent=1) + "\n")
            fresh.replace(path)
        except OSError as error:
            log.warning("a profile is not kept beyond a restart", path=str(path), error=str(error))
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)

    def forget(self, digest: Digest) -> None:
        """Delete the profile of a checkpoint that is deleted."""
        self._profiles.pop(digest, None)
        path = self._directory / f"{digest}.json"
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a profile cannot be deleted", path=str(path), error=str(error))


class Profiling:
    """Passes profiles under way between the controller and engines, and answers for engines that cannot."""

    def __init__(
        self,
        profiles: Profiles,
        to_engine: Callable[[EngineId, object], None],
        to_controller: Callable[[object], None],
    ) -> None:
        self._profiles = profiles
        self._to_engine, self._to_controller = to_engine, to_controller
        self._engines: dict[TaskId, EngineId] = {}

    def start(self, wish: ProfileInstance, engine_id: EngineId | None, is_node_busy: bool) -> None:
        """Hand a wish on. Refused while any request runs on this node: it would disturb, and be disturbed."""
        if engine_id is None:
            self._fail(wish.task_id, InstanceFailed(f"{wish.instance_id} does not serve on this node; try again"))
        elif is_node_busy:
            busy = Overloaded("requests are running on this node; profile the model when it is quiet", retry_after_s=5)
            self._fail(wish.task_id, busy)
        else:
            self._engines[wish.task_id] = engine_id
            self._to_engine(engine_id, wish)

    def heard(self, message: ProfileProgress | ProfileFinished | TaskFailed) -> None:
        """Pass on what an engine says about a profile, and keep the finished ones."""
        if isinstance(message, ProfileFinished):
            self._profiles.keep(message.profile)
        if not isinstance(message, ProfileProgress):
            self._engines.pop(message.task_id, None)
        self._to_controller(message)

    def cancel(self, task_id: TaskId) -> None:
        """End a profile nobody waits for."""
        engine_id = self._engines.pop(task_id, None)
        if engine_id is not None:
            self._to_engine(engine_id, CancelTask(task_id))

    def cancel_all(self) -> None:
        """End every profile: the controller that wished for them is gone."""
        for task_id in list(self._engines):
            self.cancel(task_id)

    def engine_gone(self, engine_id: EngineId) -> None:
        """Fail the profiles of a process that has ended."""
        for task_id in [task for task, engine in self._engines.items() if engine == engine_id]:
            del self._engines[task_id]
            self._fail(task_id, InstanceFailed("the engine process ended meanwhile; profile the model again"))

    def _fail(self, task_id: TaskId, error: NearlineError) -> None:
        self._to_controller(TaskFailed(task_id, ErrorInfo.of(error)))
