"""Other engines behind the two questions that benchmarks/engine.py asks, each in a process of its own.

Token ids in, greedy tokens out, no text. Engines that cannot be told to keep their own KV (transformers, ctranslate2)
are timed twice and subtracted: generating n + 1 tokens less generating one.
"""

import ctypes
import importlib.metadata
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_ours import random_prompt


def version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


class LlamaCpp:
    """llama.cpp through its C API: `batch` sequences in one llama_batch, as its own server decodes them."""

    MAX_SEQUENCES = 32

    def __init__(self, path: Path, num_threads: int) -> None:
        import llama_cpp
        from llama_cpp import llama_cpp as api

        self.name = f"llama.cpp ({version('llama-cpp-python')}), {path.stem}"
        self._api: Any = api
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 8192, 2048, 512
        params.n_seq_max, params.kv_unified = self.MAX_SEQUENCES, True
        params.n_threads = params.n_threads_batch = num_threads
        self._context = api.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(2048, 0, self.MAX_SEQUENCES)

    def decode_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        tokens = [self._prefill(sequence, random_prompt(num_prompt, sequence)) for sequence in range(batch)]
        started = time.perf_counter()
        for position in range(num_prompt, num_prompt + num_output):
            self._run([(tokens[s], position, s, True) for s in range(batch)])
            tokens = [self._best(row) for row in range(batch)]
        return (time.perf_counter() - started) / num_output

    def prefill_s(self, num_prompt: int) -> float:
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        started = time.perf_counter()
        self._prefill(0, random_prompt(num_prompt, num_prompt))
        return time.perf_counter() - started

    def _prefill(self, sequence: int, prompt: list[int]) -> int:
        last = len(prompt) - 1
        self._run([(token, position, sequence, position == last) for position, token in enumerate(prompt)])
        return self._best(last)

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wants_logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wants_logits
        if self._api.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def _best(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


class Transformers:
    """`generate` of transformers in bfloat16, its dynamic cache, greedy."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(num_threads)
        self.name = f"{version('transformers')}, generate, bf16"
        self._torch: Any = torch
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        self._model = model.eval()

    def decode_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        first = self._generate_s(batch, num_prompt, 1)
        return (self._generate_s(batch, num_prompt, num_output + 1) - first) / num_output

    def prefill_s(self, num_prompt: int) -> float:
        return self._generate_s(1, num_prompt, 1)

    def _generate_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        ids = self._torch.tensor([random_prompt(num_prompt, row) for row in range(batch)])
        started = time.perf_counter()
        with self._torch.inference_mode():
            self._model.generate(
                input_ids=ids, attention_mask=self._torch.ones_like(ids), do_sample=False, pad_token_id=0,
                eos_token_id=None, max_new_tokens=num_output, min_new_tokens=num_output,
            )  # fmt: skip
        return time.perf_counter() - started


class ContinuousTransformers(Transformers):
    """`generate_batch` of transformers: its own continuous batching with a paged cache."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        super().__init__(directory, num_threads)
        self.name = f"{version('transformers')}, continuous batching, bf16, prompts included"
        self._generate_s(1, 8, 2)

    def decode_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        """Of whole answers, prompts included: what one token and many take differs by less than their noise."""
        self._generate_s(batch, num_prompt, 1)
        return self._generate_s(batch, num_prompt, num_output) / num_output

    def _generate_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        import transformers

        configured: Any = transformers.GenerationConfig
        prompts = [random_prompt(num_prompt, row) for row in range(batch)]
        config = configured(
            max_new_tokens=num_output, do_sample=False, eos_token_id=-1, pad_token_id=0, num_blocks=512,
            max_batch_tokens=1024,
        )  # fmt: skip
        started = time.perf_counter()
        results = self._model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        seconds = time.perf_counter() - started
        if len(results) != batch or any(len(r.generated_tokens) != num_output for r in results.values()):
            raise RuntimeError("continuous batching did not generate what was asked")
        return seconds


class CTranslate2:
    """ctranslate2's Generator on the converted directory."""

    def __init__(self, directory: Path, num_threads: int, compute_type: str) -> None:
        import ctranslate2  # type: ignore[import-untyped]

        self.name = f"{version('ctranslate2')}, {compute_type}"
        converted = directory.with_name(f"ct2-{compute_type}")
        if not converted.exists():
            converter = ctranslate2.converters.TransformersConverter(str(directory))
            converter.convert(str(converted), quantization=compute_type)
        self._generator = ctranslate2.Generator(
            str(converted), compute_type=compute_type, intra_threads=num_threads, inter_threads=1
        )
        self._vocabulary = _vocabulary(directory)

    def decode_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        first = self._generate_s(batch, num_prompt, 1)
        return (self._generate_s(batch, num_prompt, num_output + 1) - first) / num_output

    def prefill_s(self, num_prompt: int) -> float:
        return self._generate_s(1, num_prompt, 1)

    def _generate_s(self, batch: int, num_prompt: int, num_output: int) -> float:
        prompts = [[self._vocabulary[t] for t in random_prompt(num_prompt, row)] for row in range(batch)]
        started = time.perf_counter()
        self._generator.generate_batch(
            prompts, max_length=num_output, min_length=num_output, end_token=[], include_prompt_in_result=False
        )
        return time.perf_counter() - started


def _vocabulary(directory: Path) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    found: list[str] = tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))
    return found
