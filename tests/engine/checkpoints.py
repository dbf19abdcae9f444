"""Tiny models and adapters on disk, imported with the real command, and what transformers and peft make of them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_checkpoint(root: Path, kind: str, source: Path, base: str | None = None) -> Path:
    """Import with the real command; return the committed directory."""
    command = [sys.executable, "-m", "nearline.checkpoint_store", "import", "--root", str(root), "--kind", kind]
    command += ["--source", str(source), *(["--base", base] if base else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    assert "checkpoint" in last, (last, done.stderr)
    return root / "checkpoints" / str(last["checkpoint"]["digest"])


def make_sources(tiny_llama_dir: Callable[..., Path], directory: Path) -> dict[str, Path]:
    """Two models as Hugging Face directories and two adapters of the first as peft directories."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = {"a": tiny_llama_dir(seed=1, initializer_range=0.3), "b": tiny_llama_dir(seed=2, initializer_range=0.3)}
    for seed, rank in ((3, 4), (4, 8)):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(made["a"])
        config = LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
        made[f"lora{rank}"] = directory / f"lora{rank}"
        get_peft_model(base, config).save_pretrained(made[f"lora{rank}"])
    return made


class Oracle:
    """transformers, greedy, one prompt at a time, optionally with a peft adapter."""

    def __init__(self, directory: Path, adapter: Path | None = None) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()
        if adapter is not None:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, adapter)

    def __call__(self, prompt: list[int], num_tokens: int = 12) -> list[int]:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([prompt])
            output = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return [int(token) for token in output[0, len(prompt) :]]
