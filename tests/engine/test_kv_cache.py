"""Sizing and copying of the KV cache."""

import pytest
import torch

from nearline.engine.kv_cache import HostStore, KVCache, block_bytes
from nearline.protocol import DecoderSpec, decoder_spec
from nearline.protocol.errors import OutOfMemory

CPU = torch.device("cpu")


@pytest.fixture
def spec() -> DecoderSpec:
    return decoder_spec({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64,
    })  # fmt: skip


def test_a_budget_buys_whole_blocks(spec: DecoderSpec) -> None:
    # 3 layers × (key and value) × 2 heads × 16 dims × 16 positions × 2 bytes
    assert block_bytes(spec, 16, torch.bfloat16) == 3 * 2 * 2 * 16 * 16 * 2
    cache = KVCache.within(spec, 10 * block_bytes(spec, 16, torch.bfloat16) + 5, 16, torch.bfloat16, CPU)
    assert (cache.num_blocks, cache.num_tokens) == (10, 160)
    assert len(cache.layers) == 3
    assert all(tensor.shape == (10, 2, 16, 16) and tensor.is_contiguous() for pair in cache.layers for tensor in pair)


def test_a_budget_below_one_block_names_the_numbers(spec: DecoderSpec) -> None:
    with pytest.raises(OutOfMemory, match=r"1000 bytes holds no block.*6144 bytes; raise kv_bytes"):
        KVCache.within(spec, 1000, 16, torch.bfloat16, CPU)


def test_memory_starts_as_zeros(spec: DecoderSpec) -> None:
    cache = KVCache(spec, 4, 16, torch.float32, CPU)
    assert all(not tensor.any() for pair in cache.layers for tensor in pair)


def test_blocks_are_copied_in_every_layer_as_if_all_at_once(spec: DecoderSpec) -> None:
    cache = KVCache(spec, 4, 16, torch.float32, CPU)
    before = [(torch.randn_like(k), torch.randn_like(v)) for k, v in cache.layers]
    for (k, v), (old_k, old_v) in zip(cache.layers, before, strict=True):
        k.copy_(old_k)
        v.copy_(old_v)
    cache.copy_blocks([(0, 1), (1, 0), (2, 3)])
    for (k, v), (old_k, old_v) in zip(cache.layers, before, strict=True):
        for new, old in ((k, old_k), (v, old_v)):
            assert torch.equal(new, old[[1, 0, 2, 2]])


def test_what_was_saved_on_the_host_comes_back_into_other_blocks(spec: DecoderSpec) -> None:
    cache = KVCache(spec, 4, 16, torch.float32, CPU)
    assert cache.block_bytes == block_bytes(spec, 16, torch.float32)
    host = HostStore(cache, 3 * cache.block_bytes + 1)
    assert host.num_blocks == 3
    before = cache.store.copy_(torch.randn_like(cache.store)).clone()
    host.save([(3, 0), (1, 2)])
    cache.store.zero_()
    host.restore([(2, 3), (0, 0)])
    assert torch.equal(cache.store[:, :, [0, 3]], before[:, :, [3, 1]])
    assert not cache.store[:, :, [1, 2]].any()
