"""One node agent from start to stop: directory, store, HTTP and runtime, opened in order and closed in reverse."""

import asyncio
import os
import signal

import structlog

from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.node_agent.config import NodeConfig, check
from nearline.node_agent.data_dir import locked_data_dir, node_id
from nearline.node_agent.devices import probe_hardware
from nearline.node_agent.http import NodeHttp
from nearline.node_agent.runtime import NodeIdentity, NodeRuntime
from nearline.node_agent.watched import watched
from nearline.protocol.errors import InvalidRequest

log = structlog.get_logger()


async def run_agent(config: NodeConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises NearlineError when the agent cannot start."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with locked_data_dir(config.data_dir):
        hardware = await asyncio.to_thread(probe_hardware)
        check(config, hardware)
        store_config = StoreConfig(
            root=config.data_dir / "store",
            dram_pool_bytes=config.pool_bytes,
            ssd_budget_bytes=config.ssd_bytes,
            memory_bytes=hardware.memory_bytes,
        )
        store = await asyncio.to_thread(CheckpointStore, store_config)
        try:
            runtimes: list[NodeRuntime] = []
            http = NodeHttp(store, config.token, lambda: runtimes[0].health() if runtimes else {"status": "starting"})
            try:
                port = await http.start(config.host, config.port)
            except OSError as error:
                # asyncio adds words of Python; an address that cannot be found has a number of its own
                why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
                reason = f"cannot listen on {config.host}:{config.port} ({why})"
                raise InvalidRequest(f"{reason}; free it or choose another --host or --port (0 picks one)") from None
            try:
                identity = NodeIdentity(node_id(config.data_dir, config.node_id), config.host, port)
                runtimes.append(NodeRuntime(config, hardware, store, identity))
                log.info("node agent up", node_id=identity.node_id, http_port=port, devices=len(hardware.devices))
                await _until(stopped, runtimes[0])
            finally:
                await http.close()
        finally:
            await asyncio.to_thread(store.close)
    log.info("node agent stopped")


async def _until(stopped: asyncio.Event, runtime: NodeRuntime) -> None:
    """Run the runtime until the event, or until it fails: then its error is ours."""
    running = watched(runtime.run(), "runtime")
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        await running
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
