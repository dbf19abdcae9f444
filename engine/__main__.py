"""`python -m nearline.engine`: an engine process, pre-warmed and bound by the node agent that started it."""

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType

from nearline.engine.config import MergeMode, PolicyName

PR_SET_PDEATHSIG = 1
log = logging.getLogger(__name__)


def main() -> int:
    started_at = time.monotonic()
    parent = os.getppid()
    arguments = _arguments()
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the parent's to act on
    signal.signal(signal.SIGTERM, leave)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s"
    )
    # torch takes a second to import; the above must hold meanwhile.
    import torch

    from nearline.engine.instance import EngineHabits
    from nearline.engine.link import AgentLink
    from nearline.engine.server import EngineServer
    from nearline.engine.warmup import warm_up

    device = arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    warm_up(device, len(os.sched_getaffinity(0)))
    habits = EngineHabits(
        device=device,
        step_tokens=arguments.step_tokens or None,
        is_prefix_cached=not arguments.no_prefix_cache,
        policy=PolicyName(arguments.policy),
        tpot_s=arguments.tpot_ms / 1e3,
        future_share=arguments.future_share,
        swap_bytes=arguments.swap_bytes,
        merge=MergeMode(arguments.merge),
    )
    gc.collect()
    gc.freeze()  # torch's hundred thousand objects stay: no collection in the middle of a request walks them again
    link = AgentLink(socket.socket(fileno=arguments.socket_fd))
    return EngineServer(link, arguments.pool_fd, arguments.ready_fd, habits).serve(time.monotonic() - started_at)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nearline.engine", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True, help="inherited end of the Unix socket to the agent")
    parser.add_argument("--pool-fd", type=int, required=True, help="inherited memfd of the DRAM pool")
    parser.add_argument("--ready-fd", type=int, required=True, help="inherited memfd of the pool's ready bytes")
    parser.add_argument("--device", help="torch device; default: cuda:0 if there is one, else cpu")
    parser.add_argument("--step-tokens", type=int, default=512, help="token budget of a step; 0: prompts are not cut")
    parser.add_argument(
        "--policy", choices=[*PolicyName], default=PolicyName.FCFS, help="in which order sequences run (default: fcfs)"
    )
    parser.add_argument(
        "--tpot-ms", type=float, default=100.0, help="target between tokens: prompts are cut so that steps keep it"
    )
    parser.add_argument(
        "--future-share", type=float, default=1.0, help="share of the declared length that admission finds room for"
    )
    parser.add_argument(
        "--swap-bytes",
        type=int,
        default=0,
        help="host memory for the KV of preempted sequences (default: computed again)",
    )
    parser.add_argument(
        "--merge",
        choices=[*MergeMode],
        default=MergeMode.NEVER,
        help="run adapters on weights they are merged into (default: never; under auto near ties may fall otherwise)",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="never reuse the KV of equal prefixes")
    return parser.parse_args()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("prctl failed: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(0)


def leave(_signal: int, _frame: FrameType | None) -> None:
    """End at once: an exception could be swallowed where it finds the process, and nothing of it outlives it anyway."""
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
