"""A run as a picture: the distribution of times to first token. matplotlib is needed only here."""

from collections.abc import Sequence
from pathlib import Path

from nearline.protocol import Seconds


def plot_ttft(ttft_s: Sequence[Seconds], path: Path, title: str) -> None:
    """Write a PNG of the cumulative distribution. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranked = sorted(max(value, 1e-3) for value in ttft_s)
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    axes.plot(ranked, [(n + 1) / len(ranked) for n in range(len(ranked))], drawstyle="steps-post")
    axes.set(xscale="log", xlabel="time to first token, s", ylabel="part of requests", title=title, ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
