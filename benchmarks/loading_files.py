"""The checkpoints that loaders are measured on: random Llama-shaped weights in every format the rivals read."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nearline.protocol import decoder_spec, tensor_slots

NUM_SHARDS = 4
VOCAB = 128256
_TILE_VALUES = 4_000_037
_TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 2}, "unk_token": "<unk>"},
    "added_tokens": [],
}


def llama_config(num_bytes: int, is_narrow: bool = False) -> dict[str, Any]:
    """Describe a Llama of about so many bytes in bfloat16, shaped like the 1B of Llama 3.2 with more or fewer layers.

    `is_narrow`: as many tensors, a tenth of the bytes.
    """
    width, vocab = (2048, VOCAB) if num_bytes > 1 << 30 else (512, 1024)
    layer_bytes = 2 * (width * width * 2 + 2 * width * width // 4 + 3 * width * 4 * width)
    num_layers = max(2, (num_bytes - 2 * vocab * width) // layer_bytes)
    width //= 4 if is_narrow else 1
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": max(1, width // 64),
        "num_key_value_heads": max(1, width // 256),
        "head_dim": 64,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
        "bos_token_id": 1,
    }


def write_model(directory: Path, num_bytes: int, seed: int, is_narrow: bool = False) -> int:
    """Write a Hugging Face directory with one safetensors file; return the bytes of its tensors.

    One tile of numbers is drawn, written over and over: its odd length makes no two chunks alike.
    """
    config = llama_config(num_bytes, is_narrow)
    _write_small_files(directory, config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for slot in tensor_slots(decoder_spec(config)):
        start, end = end, end + 2 * math.prod(slot.shape)
        header[slot.name] = {"dtype": "BF16", "shape": list(slot.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draw = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(_TILE_VALUES, generator=draw) * 0.02).to(torch.bfloat16)
    tile: Any = memoryview(numbers.view(torch.uint8).numpy())  # type: ignore[arg-type]
    with (directory / "model.safetensors").open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(tile)):
            file.write(tile[: end - start])
    return end


def write_rival_formats(work: Path) -> None:
    """Write the tensors of `one-file` in shards, as a torch file and, if tensorizer is here, as its file."""
    tensors = load_file(work / "one-file" / "model.safetensors")
    sharded = work / "sharded"
    shutil.copytree(work / "one-file", sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    total = sum(t.nbytes for t in tensors.values())
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_SHARDS)]
    done = 0
    for name, tensor in tensors.items():
        shards[min(done * NUM_SHARDS // total, NUM_SHARDS - 1)][name] = tensor
        done += tensor.nbytes
    index: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        save_file(shard, sharded / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (sharded / "model.safetensors.index.json").write_text(text)
    (work / "torch").mkdir()
    torch.save(tensors, work / "torch" / "model.pt")
    _write_tensorizer(work / "tensorizer", tensors)


def sync(directory: Path) -> None:
    """Have everything below a directory on disk, so that no later measurement pays for it."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _write_tensorizer(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    directory.mkdir()
    try:
        from tensorizer import TensorSerializer
    except ImportError:
        return
    serializer = TensorSerializer(str(directory / "model.tensors"))
    serializer.write_state_dict(tensors)
    serializer.close()


def _write_small_files(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
