"""The engine on a device against transformers; graphs, pinned frames, swap: part of gpu_check."""

import contextlib
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_kernels import Finding
from benchmarks.loading_files import write_model
from benchmarks.loading_ours import import_s
from nearline.checkpoint_store import WEIGHTS_NAME, CheckpointStore, StoreConfig
from nearline.engine.decode_graphs import DecodeGraphs
from nearline.engine.decode_shapes import RecordingPlan
from nearline.engine.models.adapter_weights import Adapter, LoraWeights
from nearline.engine.runner import Runner, RunnerConfig
from nearline.engine.sequence import Sequence
from nearline.engine.types import Batch, BatchItem
from nearline.loader import MappedPool, attach
from nearline.protocol import Digest, ModelId, Request, RequestId, SamplingParams, decoder_spec

TINY: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2": {"sliding_window": 16}, "OPT": {"ffn_dim": 112}, "Llama": {}, "Mistral": {"sliding_window": 24},
    "Qwen2": {}, "Qwen3": {}, "SmolLM3": {"no_rope_layer_interval": 2},
    "Granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125},
    "Olmo2": {}, "Phi3": {}, "Gemma": {}, "GPT2": {},
    "Gemma3": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
_NUM_INTERPRETED = 2
_BLOCK = 16


class Driver:
    """A runner and the plainest loop that can drive it."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], settings: RunnerConfig) -> None:
        weights: Any = SimpleNamespace(
            tensor=tensors.__getitem__,
            fused=lambda names: torch.cat([tensors[name] for name in names]),
            wait_for=lambda names: None,
        )
        self.runner = Runner(weights, decoder_spec(config), settings)
        self._next_block = 0

    def sequence(self, tokens: Seq[int], sampling: SamplingParams, adapter: Digest | None = None) -> Sequence:
        request = Request(RequestId("r"), ModelId("m"), tuple(tokens), sampling, adapter_digest=adapter)
        count = (len(tokens) + 80) // _BLOCK + 1
        blocks = list(range(self._next_block, self._next_block + count))
        self._next_block = (self._next_block + count) % (self.runner.num_blocks - count)
        return Sequence(request, 1, list(tokens), arrived_at=0.0, block_table=blocks)

    def step(self, sequences: Seq[Sequence]) -> None:
        items = [BatchItem(s, s.num_computed, s.num_uncomputed, True) for s in sequences]
        for sequence, outcome in zip(sequences, self.runner.run(Batch(items)), strict=True):
            if outcome.error is not None:
                raise outcome.error.exception()
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(outcome.token_id)

    def generate(self, sequences: Seq[Sequence], num_tokens: int) -> list[list[int]]:
        for _ in range(num_tokens):
            self.step(sequences)
        return [sequence.token_ids[sequence.num_prompt :] for sequence in sequences]

    def logits(self, tokens: Seq[int], adapter: Digest | None = None) -> Tensor:
        """Logits after every position, the last ones decoded one by one."""
        sequence, parts = self.sequence(tokens, SamplingParams(), adapter), []
        for start, end in ((0, len(tokens) - 3), *((at, at + 1) for at in range(len(tokens) - 3, len(tokens)))):
            hidden, _ = self.runner.hidden([BatchItem(sequence, start, end - start, True)])
            parts.append(self.runner.decoder.logits(hidden))
        return torch.cat(parts).float().cpu()


def check_engine(device: str, is_small: bool, deadline: float) -> Iterator[Finding]:
    """Run every check, each a finding; interpreted, the kernels take the place of the compiled ones on the CPU."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        yield Finding("engine", "parity", "skipped: transformers is not installed")
        return
    names = list(FAMILIES)[:_NUM_INTERPRETED] if is_small else list(FAMILIES)
    dtypes = (torch.float32,) if is_small else (torch.float32, torch.bfloat16)
    with interpreted() if is_small else contextlib.nullcontext():
        for name in names:
            for dtype in dtypes:
                what = f"{name} in {str(dtype).removeprefix('torch.')} against transformers"
                yield guarded("engine", what, deadline, lambda n=name, d=dtype: _parity(n, d, device))  # type: ignore[misc]
        for what, check in (("adapters of two ranks in one batch", _lora), ("graphs on and off", _graphs)):
            yield guarded("engine", what, deadline, lambda c=check: c(device))  # type: ignore[misc]
    yield guarded("engine", "blocks swapped to the host and back", deadline, lambda: _swap(device))


def guarded(part: str, what: str, deadline: float, check: Callable[[], tuple[str, str, bool | None]]) -> Finding:
    """Make a finding of a check: of its failure too, so that the others still run; none after the deadline."""
    if time.monotonic() > deadline:
        return Finding(part, what, "skipped: out of time")
    try:
        return Finding(part, what, *check())
    except Exception as error:
        return Finding(part, what, f"{type(error).__name__}: {str(error)[:200]}", "", False)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Let CPU tensors take the Triton path, whose kernels are interpreted in this process."""
    from nearline.kernels import native, triton_path

    dispatch: Any = importlib.import_module("nearline.kernels.dispatch")
    plain = dispatch.native
    shim: Any = SimpleNamespace(**{name: getattr(triton_path, name) for name in triton_path.__all__})
    shim.linear, shim.library = lambda *_: None, lambda: None
    dispatch.native, native_library = shim, native.library
    native.library = lambda: None  # type: ignore[assignment]  # so that no run of layers is compiled
    try:
        yield
    finally:
        dispatch.native, native.library = plain, native_library


def tiny_model(name: str, dtype: torch.dtype, device: str) -> Any:
    import transformers

    cls = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")
    config = cls.config_class(**(TINY | FAMILIES[name]))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            spread = 0.2 if parameter.dim() == 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * spread + ("norm" in key or ".ln_" in key))
            parameter.data = parameter.data.to(dtype)
    return model.to(device)


def driver_of(model: Any, device: str, **settings: Any) -> Driver:
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return Driver(tensors, config, RunnerConfig(kv_bytes=8 << 20, device=device, **settings))


def _tokens(length: int) -> list[int]:
    return [(7 * i * i + 3 * i) % 190 + 3 for i in range(length)]


@torch.inference_mode()
def _parity(name: str, dtype: torch.dtype, device: str) -> tuple[str, str, bool]:
    tokens = _tokens(9 if device == "cpu" else 70)
    model = tiny_model(name, dtype, device)
    batch = torch.tensor([tokens], device=device)
    ours, theirs = driver_of(model, device).logits(tokens), model(batch).logits[0].float().cpu()
    if dtype == torch.float32:
        worst = float((ours - theirs).abs().max())
        return f"logits differ by {worst:.1e} at most", "≤ 1e-3", worst <= 1e-3
    exact = model.float()(batch).logits[0].cpu()
    error, own = (float((x - exact).square().mean().sqrt()) for x in (ours, theirs))
    return f"{error / own:.2f} × transformers' own error against float32", "≤ 1.25", error <= 1.25 * own


@torch.inference_mode()
def _lora(device: str) -> tuple[str, str, bool]:
    model, tokens = tiny_model("Llama", torch.float32, device), _tokens(5)
    worst, base = 0.0, driver_of(model, device).logits(tokens)
    driver = driver_of(model, device)
    for digest, rank in (("a", 4), ("b", 16)):
        a, b = torch.randn(rank, 64) * 0.1, torch.randn(64, rank) * 0.3
        weights = LoraWeights(a.to(device), b.T.contiguous().T.to(device))
        driver.runner.adapters.add(Adapter.of(Digest(digest), [{"q_proj": weights, "o_proj": weights}] * 2))
        merged = tiny_model("Llama", torch.float32, device)
        for layer in merged.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.o_proj):
                projection.weight += (b @ a).to(device)
        expected = merged(torch.tensor([tokens], device=device)).logits[0].cpu()
        worst = max(worst, float((driver.logits(tokens, Digest(digest)) - expected).abs().max()))
    unchanged = float((driver.logits(tokens) - base).abs().max())
    return (
        f"differ by {worst:.1e} from merged weights, the base by {unchanged:.1e}",
        "≤ 1e-3",
        max(worst, unchanged) <= 1e-3,
    )


def _graphs(device: str) -> tuple[str, str, bool]:
    """On a CPU a recording runs its step again; on CUDA it is a graph."""
    model, outputs, recorded = tiny_model("Llama", torch.float32, device), [], 0
    count = 3 if device == "cpu" else 40
    for is_recorded in (False, True):
        driver = driver_of(model, device, is_recorded=is_recorded)
        runner: Any = driver.runner
        if is_recorded and device == "cpu":
            plan = RecordingPlan(max_bytes=1 << 30, after_steps=0)
            runner._graphs = DecodeGraphs(runner.decoder, runner.kv, lambda work: (work, 0), plan)
        wishes = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(seed=5, top_p=0.9)]
        outputs.append(driver.generate([driver.sequence(_tokens(5 + i), wish) for i, wish in enumerate(wishes)], count))
        recorded = runner._graphs.num_recorded if runner._graphs else 0
    is_same = outputs[0] == outputs[1]
    return f"{'equal' if is_same else 'different'} tokens, {recorded} sizes recorded", "equal", is_same and recorded > 0


def _swap(device: str) -> tuple[str, str, bool]:
    runner = driver_of(tiny_model("Llama", torch.float32, device), device, host_bytes=4 << 20).runner
    store = runner.kv.store
    store.copy_(torch.randn(store.shape))
    before = store[:, :, [3, 5, 9]].clone()
    runner.host.save([(3, 0), (5, 1), (9, 2)])
    store[:, :, [3, 5, 9]] = 0
    runner.host.restore([(0, 9), (1, 3), (2, 5)])
    is_same = torch.equal(store[:, :, [9, 3, 5]], before)
    return ("the same bits" if is_same else "other bits"), "the same", is_same


def check_loader(device: str, deadline: float, num_bytes: int) -> Iterator[Finding]:
    """Attach a checkpoint on the device while it is read, twice, and once more closed half-way."""
    with tempfile.TemporaryDirectory() as scratch:
        root, source = Path(scratch) / "store", Path(scratch) / "model"
        write_model(source, num_bytes, seed=1)
        digest, _ = import_s(root, source)
        store = CheckpointStore(StoreConfig(root=root, dram_pool_bytes=num_bytes + (128 << 20), touch_ahead_bytes=0))
        pool = MappedPool(store.pool.fd, store.pool.ready_fd, store.pool.layout)
        try:
            for what, check in (
                ("tensors while they are read", _attached),
                ("tensors from DRAM, frames pinned before", _attached),
                ("closing half-way", _closed_early),
            ):
                yield guarded("loader", what, deadline, lambda c=check: c(store, pool, digest, device))  # type: ignore[misc]
        finally:
            pool.close()
            store.close()


def _attached(store: CheckpointStore, pool: MappedPool, digest: Digest, device: str) -> tuple[str, str, bool]:
    from safetensors.torch import load_file

    truth = load_file(store.directory(digest) / WEIGHTS_NAME)
    with store.acquire(digest) as lease:
        loaded = attach(pool, lease.directory, lease.frames, device)
        wrong = []
        for name, tensor in truth.items():
            loaded.wait_for([name])
            if not torch.equal(loaded.tensor(name).cpu(), tensor):
                wrong.append(name)
        is_complete = loaded.is_complete()
        loaded.close()
    return f"{len(wrong)} of {len(truth)} tensors differ {wrong[:2] or ''}".strip(), "0", not wrong and is_complete


def _closed_early(store: CheckpointStore, pool: MappedPool, digest: Digest, device: str) -> tuple[str, str, bool]:
    store.evict(digest)
    started = time.monotonic()
    with store.acquire(digest) as lease:
        attach(pool, lease.directory, lease.frames, device).close()
    elapsed = time.monotonic() - started
    return f"{elapsed:.2f} s", "< 10 s", elapsed < 10
