"""A run as a picture: times to first token and between tokens, as distributions. matplotlib is needed only here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearline.protocol import Seconds
from nearline.simulator.outcome import Outcome


def plot_ttft(outcome: Outcome, path: Path, title: str) -> None:
    """Write a picture of the kind that `path` ends in. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (first, pace) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=120)
    by_class: dict[str, list[Seconds]] = {}
    for call in outcome.calls:
        if call.ttft_s is not None:
            by_class.setdefault(call.arrival.slo.slo_class.value, []).append(call.ttft_s)
    for name, values in sorted(by_class.items()):
        _distribution(first, values, name)
    _distribution(pace, outcome.tpot_s, "all")
    first.set(xlabel="time to first token, s", ylabel="part of requests")
    first.legend()
    pace.set(xlabel="time per output token, s")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _distribution(axes: Any, values: Sequence[Seconds], label: str) -> None:
    ranked = sorted(max(value, 1e-3) for value in values)
    axes.plot(ranked, [(n + 1) / len(ranked) for n in range(len(ranked))], drawstyle="steps-post", label=label)
    axes.set(xscale="log", ylim=(0, 1))
    axes.grid(alpha=0.3)
