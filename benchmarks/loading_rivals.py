"""Other loaders, each behind one function, in a process that has imported it and forks for every load.

Usage: python -m benchmarks.loading_rivals NAME     One JSON line in ({"path"}) per load, one out.
A fork has the imports but not the memory of earlier loads: none leaks into the next one.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Reader = Callable[[Path], Iterable[torch.Tensor]]
PAGE_BYTES = 4096


def touch(tensor: torch.Tensor) -> None:
    """Read one byte of every page."""
    if tensor.numel():
        int(tensor.detach().reshape(-1).view(torch.uint8)[::PAGE_BYTES].sum())


def _shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def _safetensors() -> Reader:
    from safetensors.torch import load_file

    return lambda path: [tensor for shard in _shards(path) for tensor in load_file(shard).values()]


def _torch_load(mmap: bool) -> Callable[[], Reader]:
    def make() -> Reader:
        return lambda path: torch.load(path / "model.pt", weights_only=True, mmap=mmap).values()

    return make


def _transformers() -> Reader:
    from transformers import AutoModelForCausalLM

    def read(path: Path) -> Iterable[torch.Tensor]:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        return list(model.state_dict(keep_vars=True).values())

    return read


def _runai() -> Reader:
    from runai_model_streamer import SafetensorsStreamer

    def read(path: Path) -> Iterable[torch.Tensor]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(shard) for shard in _shards(path)])
            return [tensor for _, tensor in streamer.get_tensors()]

    return read


def _fastsafetensors() -> Reader:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def read(path: Path) -> Iterable[torch.Tensor]:
        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: [str(shard) for shard in _shards(path)]})
        buffer = loader.copy_files_to_device()
        tensors = [buffer.get_tensor(name) for name in loader.get_keys()]
        _KEPT.append((loader, buffer))
        return tensors

    return read


def _tensorizer() -> Reader:
    from tensorizer import TensorDeserializer

    def read(path: Path) -> Iterable[torch.Tensor]:
        tensors = TensorDeserializer(str(path / "model.tensors"), device="cpu", num_readers=4)
        _KEPT.append(tensors)
        return list(tensors.values())

    return read


_KEPT: list[Any] = []
"""What owns the bytes of tensors, until the fork ends."""
READERS: dict[str, tuple[str, str, bool, Callable[[], Reader]]] = {
    "safetensors": ("safetensors", "one-file", True, _safetensors),
    "torch.load": ("torch", "torch", False, _torch_load(False)),
    "torch.load mmap": ("torch", "torch", False, _torch_load(True)),
    "transformers": ("transformers", "one-file", True, _transformers),
    "runai-model-streamer": ("runai-model-streamer", "one-file", True, _runai),
    "fastsafetensors": ("fastsafetensors", "one-file", True, _fastsafetensors),
    "tensorizer": ("tensorizer", "tensorizer", False, _tensorizer),
}
"""Name: (distribution, its folder, whether it reads shards, reader)."""


def version(name: str) -> str | None:
    """Version of a rival's distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(READERS[name][0])
    except importlib.metadata.PackageNotFoundError:
        return None


def _load(read: Reader, path: Path) -> dict[str, Any]:
    before, started = time.process_time(), time.perf_counter()
    tensors = list(read(path))
    loaded_s = time.perf_counter() - started
    num_bytes = 0
    for tensor in {t.data_ptr(): t for t in tensors}.values():
        touch(tensor)
        num_bytes += tensor.nbytes
    usable_s = time.perf_counter() - started
    return {"loaded_s": loaded_s, "usable_s": usable_s, "cpu_s": time.process_time() - before, "num_bytes": num_bytes}


def _fork_and_load(read: Reader, path: Path) -> str:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(_load(read, path))
        except BaseException as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer or json.dumps({"error": "the load ended without an answer"})


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to stderr
    read = READERS[sys.argv[1]][3]()
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(_fork_and_load(read, Path(json.loads(line)["path"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
