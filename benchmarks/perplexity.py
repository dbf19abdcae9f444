"""What 8 and 4 bits cost in answers: perplexity of one model in every weight format, on prose that Python ships.

Usage: python -m benchmarks.perplexity [--model FILE.gguf | DIR] [--windows 8] [--out DIR]
The text is CPython's own documentation (`pydoc_data.topics`), which every installation has.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer

from benchmarks import record
from benchmarks.cold_start import make_rival_directory
from benchmarks.perplexity_models import make_models
from nearline import kernels
from nearline.engine.runner import Runner, RunnerConfig
from nearline.kernels import AttentionMeta
from nearline.loader import load_directory
from nearline.protocol import decoder_spec

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 512
BASE = "bf16"
_LIMITS = {"int8": 0.01}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    options = parser.parse_args()
    kernels.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="nearline-perplexity-") as scratch:
        work, hf = Path(scratch), options.model
        if options.model.is_file():
            hf = work / "hf"
            make_rival_directory(options.model, hf)
        found = {}
        for label, directory in make_models(hf, work).items():
            found[label] = perplexity(directory, options.windows)
            print(f"{label:35} {found[label][0]:8.4f}  {found[label][1] / 1e6:6.1f} MB", flush=True)
    print(record.write("perplexity", "Perplexity of quantised weights", report(found, options.windows), options.out))
    draw(found, options.out / "perplexity.svg")


def text_ids(directory: Path, count: int) -> list[int]:
    """Tokens of the longest articles of Python's documentation, in the order of their names."""
    articles = [topics[name] for name in sorted(topics) if len(topics[name]) > 3000]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return list(tokenizer.encode("\n\n".join(articles)[: 12 * count], add_special_tokens=False).ids[:count])


@torch.inference_mode()
def perplexity(directory: Path, num_windows: int) -> tuple[float, int]:
    """exp of the mean negative log-likelihood of each token given those before it in its window; and the bytes."""
    weights = load_directory(directory, "cpu")
    spec = decoder_spec(json.loads((directory / "config.json").read_text()))
    # Everything in float32 but what is stored otherwise: the weights' formats are compared, not the activations'.
    runner = Runner(weights, spec, RunnerConfig(kv_bytes=64 << 20, dtype=torch.float32))
    ids = torch.tensor(text_ids(directory, num_windows * WINDOW)).view(num_windows, WINDOW)
    total = sum(_window_loss(runner, window) for window in ids)
    return math.exp(total / (num_windows * (WINDOW - 1))), weights.manifest.num_bytes


def _window_loss(runner: Runner, ids: torch.Tensor) -> float:
    positions = torch.arange(WINDOW, dtype=torch.int32)
    table = torch.arange(-(-WINDOW // runner.kv.block_size), dtype=torch.int32)[None]
    ends = torch.tensor([0, WINDOW], dtype=torch.int32)
    runner.decoder.reserve_positions(WINDOW)
    meta = AttentionMeta(ends, ends[1:].clone(), table, WINDOW)
    hidden = runner.decoder.forward(ids, positions, positions, meta, runner.kv)
    logits = runner.decoder.logits(hidden[:-1])
    return float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))


def loss_of(label: str, found: dict[str, tuple[float, int]]) -> float:
    return found[label][0] / found[BASE if "given" not in label else f"{BASE}, as given"][0] - 1


def draw(found: dict[str, tuple[float, int]], path: Path) -> None:
    """Bars of what each format loses."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    labels = [label for label in found if not label.startswith(BASE)]
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    colours = ["#b8b8b8" if "llama.cpp" in label else "#1f6f8b" for label in labels]
    bars = axes.barh(labels, [100 * loss_of(label, found) for label in labels], color=colours)
    axes.bar_label(bars, fmt="%.2f %%", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("perplexity above bf16, %")
    figure.savefig(path)
    plt.close(figure)


def report(found: dict[str, tuple[float, int]], num_windows: int) -> str:
    def loss(label: str) -> float:
        return loss_of(label, found)

    sizes = {label: f"{size / 1e6:.0f}" for label, (_, size) in found.items()}
    for label in ("llama.cpp Q8_0 (weights alone)", "llama.cpp Q4_1 (weights alone)", "int4, down in 4 bits too"):
        sizes[label] = ""  # stored here as the numbers they stand for
    rows = [(label, f"{p:.3f}", f"{loss(label):+.2%}", sizes[label]) for label, (p, _) in found.items()]
    rival = loss("llama.cpp Q4_1 (weights alone)")
    aims = [
        ("int8: loss ≤ 1 %", f"{loss('int8'):+.2%}", loss("int8") <= _LIMITS["int8"]),
        ("int4: no worse than Q4_1's rounding of the same weights", f"{loss('int4'):+.2%} against {rival:+.2%}",
         loss("int4") <= rival),
    ]  # fmt: skip
    parts = [
        record.table(("aim", "measured", "met"), [(a, m, "yes" if met else "**no**") for a, m, met in aims]),
        record.table(("weights", "perplexity", "loss", "MB"), rows),
        f"Text: {num_windows} windows of {WINDOW} tokens of CPython's documentation. All activations in float32. "
        "The model is only at hand as a 4-bit GGUF, whose blocks are our groups: imported as given, int4 finds the old "
        "grid and loses next to nothing, which is what a GGUF's owner gets, but says nothing about other models. The "
        "rows without \"as given\" are the same function with hidden, feed-forward and value dims in random order, so "
        "that no group lies on an old block; a model of 135M parameters, rounded to 4 bits a second time, loses far "
        "more than a large one. llama.cpp's rows hold what its file format makes of the weights (`gguf`), run by our "
        "engine; its own runs round activations to 8 bits too, ours keep 15.",
    ]  # fmt: skip
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
