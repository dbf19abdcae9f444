"""Fixtures every folder may use: the real small model and tiny random ones."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes no example fail, and a change is not refused for an example that nobody's change has to do with:
# `make test` draws the same ones each time, `make test-all` others each time.
settings.register_profile("exploring", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("exploring"), derandomize=True)
settings.load_profile("steady")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; `make test` fetches it, and so does the first test that needs it."""
    fetch = [sys.executable, str(REPOSITORY / "examples" / "fetch_smollm2.py"), str(REPOSITORY / ".models")]
    done = subprocess.run(fetch, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def tiny_tokenizer_json() -> dict[str, Any]:
    """A byte-level tokenizer without merges: 256 byte tokens, then <|bos|>, <|im_start|>, <|im_end|> (ids 256-258)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|bos|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    plain: dict[str, Any] = json.loads(tokenizer.to_str())
    return plain


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_llama_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_json: dict[str, Any]
) -> Callable[..., Path]:
    """Make a Hugging Face directory of a tiny random Llama; keywords override its config (dtype="bfloat16" too)."""

    def make(seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        shape: dict[str, Any] = {
            "vocab_size": 272, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
            "eos_token_id": 258, "bos_token_id": 256, "tie_word_embeddings": True,
        }  # fmt: skip
        config = LlamaConfig(**(shape | overrides))
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
        directory = tmp_path_factory.mktemp("tiny-llama")
        model.save_pretrained(directory)
        (directory / "tokenizer.json").write_text(json.dumps(tiny_tokenizer_json))
        settings = {"chat_template": CHATML, "eos_token": "<|im_end|>", "bos_token": "<|bos|>", "add_bos_token": False}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        return directory

    return make
