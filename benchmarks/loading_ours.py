"""Our store with a consumer or a real engine process beside it, as on a node: what `loading` times of us."""

import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from nearline.checkpoint_store import MANIFEST_NAME, WEIGHTS_NAME, CheckpointStore, StoreConfig
from nearline.protocol import (
    Digest,
    InstanceId,
    InstanceSpec,
    MessageCodec,
    ModelId,
    Request,
    RequestId,
    SamplingParams,
    encode,
)
from nearline.protocol.frames import Bind, Bound, EngineReady, FromEngine, StepDone, Submit, Unbind, Unbound

_LENGTH = struct.Struct("<I")
_QUIET_S, _POLL_S = 0.4, 0.1
_KV_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """One load: until all bytes were in the pool, until every page had been read by the consumer, CPU of both."""

    filled_s: float
    usable_s: float
    cpu_s: float
    attached_s: float


class Store:
    """A store whose pool is touched as a node's is before anybody calls, and a consumer process. Owns both."""

    def __init__(self, root: Path, pool_bytes: int) -> None:
        self.store = CheckpointStore(StoreConfig(root=root, dram_pool_bytes=pool_bytes, touch_ahead_bytes=pool_bytes))
        while self.store.pool.touched_bytes < self.store.pool.num_bytes:
            time.sleep(_POLL_S)
        pool = self.store.pool
        numbers = (pool.fd, pool.ready_fd, pool.layout.num_frames, pool.layout.frame_bytes)
        command = [sys.executable, "-m", "benchmarks.loading_consumer", *map(str, numbers)]
        self._consumer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(pool.fd, pool.ready_fd)
        )
        assert self._consumer.stdout is not None
        assert self._consumer.stdout.readline() == "ready\n"

    def load(self, digest: Digest) -> Load:
        """Load a checkpoint from wherever it is, and let go of it."""
        settle(self._consumer.pid)
        before, started = time.process_time(), time.perf_counter()
        with self.store.acquire(digest) as lease:
            answer = self._ask({"directory": str(lease.directory), "frames": lease.frames})
            usable_s = time.perf_counter() - started
            filled_s = lease.done.result(60).seconds
        cpu_s = time.process_time() - before + answer["cpu_s"]
        return Load(filled_s, usable_s, cpu_s, answer["attached_s"])

    def load_cold(self, digest: Digest, is_verified: bool = False) -> Load:
        """Load a checkpoint that is on SSD only; `is_verified`: its file looks changed, so every digest is checked."""
        self.store.evict(digest)
        if is_verified:
            os.utime(self.store.directory(digest) / WEIGHTS_NAME)
        return self.load(digest)

    def close(self) -> None:
        assert self._consumer.stdin is not None
        self._consumer.stdin.close()
        self._consumer.wait()
        self.store.close()

    def _ask(self, wish: dict[str, Any]) -> dict[str, float]:
        assert self._consumer.stdin is not None
        assert self._consumer.stdout is not None
        self._consumer.stdin.write(json.dumps(wish) + "\n")
        self._consumer.stdin.flush()
        answer: dict[str, float] = json.loads(self._consumer.stdout.readline())
        return answer


class Engine:
    """A real engine process on the store's pool; we are its node agent. Owns the process."""

    def __init__(self, store: CheckpointStore, num_threads: int) -> None:
        self._store, self._num_threads = store, num_threads
        self._socket, theirs = socket.socketpair()
        pool = store.pool
        fds = {"--socket-fd": theirs.fileno(), "--pool-fd": pool.fd, "--ready-fd": pool.ready_fd}
        command = [sys.executable, "-m", "nearline.engine", "--device", "cpu"]
        command += [text for name, fd in fds.items() for text in (name, str(fd))]
        environment = os.environ | {
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": str(num_threads),
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (ours until `close`)
        self._process = subprocess.Popen(command, pass_fds=list(fds.values()), stderr=self._log, env=environment)
        theirs.close()
        self._codec = MessageCodec(FromEngine)
        self._instance = InstanceId("")
        self._number = 0
        self._lease: Any = None
        self._random = random.Random(0)
        self._send(pool.layout)
        self._until(EngineReady)

    def start(self, digest: Digest) -> None:
        """Bind to a checkpoint wherever it is; its bytes may still be arriving."""
        self._lease = self._store.acquire(digest)
        self._number += 1
        self._instance = InstanceId(f"i{self._number}")
        spec = InstanceSpec(self._instance, ModelId("m"), digest)
        manifest = str(self._lease.directory / MANIFEST_NAME)
        self._send(Bind(spec, manifest, self._lease.frames, _KV_BYTES, 4, self._num_threads))
        self._until(Bound)

    def first_token(self, num_prompt_tokens: int, vocab: int) -> None:
        """Send a prompt nobody sent before and wait for its first token."""
        self._number += 1
        prompt = tuple(self._random.randrange(vocab) for _ in range(num_prompt_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = Request(RequestId(f"r{self._number}"), ModelId("m"), prompt, sampling)
        self._send(Submit(self._instance, request, 1))
        while True:
            for update in self._until(StepDone).updates:
                if update.finish_reason is not None:
                    assert update.error is None, update.error
                    return

    def stop(self) -> None:
        """Unbind and give the pin back."""
        self._send(Unbind())
        self._until(Unbound)
        self._lease.release()

    def settle(self) -> None:
        settle(self._process.pid)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()
        self._log.close()

    def _send(self, message: object) -> None:
        body = encode(message)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def _until(self, wanted: type) -> Any:
        while True:
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
            message = self._codec.decode(self._receive(length))
            if isinstance(message, wanted):
                return message
            assert isinstance(message, StepDone), message

    def _receive(self, num_bytes: int) -> bytes:
        received = b""
        while len(received) < num_bytes:
            try:
                part = self._socket.recv(num_bytes - len(received))
            except ConnectionResetError:
                part = b""
            if not part:
                self._log.seek(0)
                raise RuntimeError(f"the engine has ended: {self._log.read()[-2000:]}")
            received += part
        return received


def settle(pid: int) -> None:
    """Wait until a process has had nothing to do for a while: page tables are filled when nobody wants anything."""
    process = psutil.Process(pid)
    idle_since, seen = time.monotonic(), sum(process.cpu_times()[:2])
    while time.monotonic() - idle_since < _QUIET_S:
        time.sleep(_POLL_S)
        now = sum(process.cpu_times()[:2])
        if now > seen + 0.011:
            idle_since, seen = time.monotonic(), now


def import_s(root: Path, source: Path) -> tuple[Digest, float]:
    """Import a directory as the node agent does, in a process of its own; its digest and how long it took."""
    command = [
        sys.executable,
        "-m",
        "nearline.checkpoint_store",
        "import",
        "--root",
        str(root),
        "--source",
        str(source),
    ]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    elapsed = time.perf_counter() - started
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert "checkpoint" in outcome, outcome
    return Digest(outcome["checkpoint"]["digest"]), elapsed
