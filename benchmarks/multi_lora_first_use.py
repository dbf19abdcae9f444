"""What the first use of an adapter adds to the time to the first token, by where its bytes are.

Usage: python -m benchmarks.multi_lora_first_use MODEL.gguf     Prints a table.
The engine's mind, runner and reader beside the node's store, without sockets. The places take turns, adapter by
adapter; each first use stands against the mean of the same request just before and just after, with the adapter there.
"""

import argparse
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from benchmarks import record
from benchmarks.multi_lora_adapters import make_adapter
from benchmarks.multi_lora_engine import Arrival, MiniEngine, prompt
from benchmarks.multi_lora_parts import drop_from_page_cache
from nearline import kernels
from nearline.checkpoint_store import CheckpointStore, StoreConfig
from nearline.checkpoint_store.convert import import_checkpoint
from nearline.engine.adapter_memory import AdapterMemory
from nearline.loader import MappedPool, load_extents
from nearline.protocol import CheckpointKind, Digest, Seconds, decoder_spec

PLACES = ("DRAM", "SSD", "SSD, read ahead")
PROMPT_TOKENS = 8
"""Less than a block, so that nothing comes from the prefix cache, and short: a prefill's own time varies by more."""
NUM_ADAPTERS, NUM_USES = 12, 36
_POOL_BYTES, _KV_BYTES = 512 << 20, 256 << 20


class PooledEngine(MiniEngine):
    """Reads adapters as an engine does beside its node agent: out of the DRAM pool, brought there first if need be."""

    def __init__(self, directory: Path, store: CheckpointStore) -> None:
        super().__init__(directory, _KV_BYTES)
        self.store = store
        self._pool = MappedPool(store.pool.fd, store.pool.ready_fd, store.pool.layout)

    def _load(self, digest: Digest, directory: Path) -> Callable[[AdapterMemory], int]:
        lease = self.store.acquire_resident(digest) or self.store.acquire(digest)
        adapters, pool = self.runner.adapters, self._pool

        def read(memory: AdapterMemory) -> int:
            with lease:
                lease.done.result()
                loaded = load_extents(pool, directory, lease.extents, "cpu", memory.take)
            return adapters.load(digest, loaded).num_bytes

        return read


def first_uses_s(root: Path, base: Digest, digests: Sequence[Digest], num_uses: int) -> dict[str, list[Seconds]]:
    """Return the added seconds of `num_uses` first uses from each of PLACES; the first rounds meet cold code."""
    store = CheckpointStore(StoreConfig(root=root, dram_pool_bytes=_POOL_BYTES))
    engine, draw = PooledEngine(root / "checkpoints" / base, store), random.Random(1)
    added: dict[str, list[Seconds]] = {place: [] for place in PLACES}
    for turn in range(-2, num_uses):
        digest = digests[turn % len(digests)]
        for place in PLACES:
            one = _first_use_s(engine, digest, place, draw)
            if turn >= 0:
                added[place].append(one)
    store.close()
    return added


def _first_use_s(engine: PooledEngine, digest: Digest, place: str, draw: random.Random) -> Seconds:
    engine.load([digest])
    before = _ttft_s(engine, digest, draw)
    engine.forget(digest)
    engine.store.preload(digest).result()
    if place != "DRAM":
        if not engine.store.evict(digest):
            raise RuntimeError(f"adapter {digest} is still in the pool")
        drop_from_page_cache(engine.file(digest))
    if place == "SSD, read ahead":
        engine.load([digest], is_ahead=True)
    first, after = _ttft_s(engine, digest, draw), _ttft_s(engine, digest, draw)
    return first - (before + after) / 2


def _ttft_s(engine: MiniEngine, digest: Digest, draw: random.Random) -> Seconds:
    time.sleep(0.005)  # what was started behind the last request has ended
    return engine.run([Arrival(0.0, digest, prompt(draw, PROMPT_TOKENS), 1)]).ttfts_s[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--uses", type=int, default=NUM_USES, help="first uses from each place")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    kernels.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        base = import_checkpoint(root, CheckpointKind.MODEL, arguments.model).digest
        spec = decoder_spec(json.loads((root / "checkpoints" / base / "config.json").read_text()))
        digests = [make_adapter(root, base, spec, seed) for seed in range(NUM_ADAPTERS)]
        found = first_uses_s(root, base, digests, arguments.uses)
    print(record.table(("from", "ms"), [[place, record.quartiles(values)] for place, values in found.items()]))


if __name__ == "__main__":
    main()
