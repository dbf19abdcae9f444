"""ServeGen's clients: production traffic as windows of rate, variation and lengths, drawn into arrivals.

A client is two files: `chunk-N-trace.csv` (no header: window start in s, requests per s, variation of the gaps,
distribution, two parameters) and `chunk-N-dataset.json` ({window start: {input_tokens: "{length: part}", ...}}).
Source: ServeGen (Alibaba): clients are drawn independently, Gamma or Weibull gaps per window.
"""

import ast
import csv
import json
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import gamma
from pathlib import Path
from random import Random

from nearline.protocol import Seconds, TenantId
from nearline.simulator.arrivals import Arrival, model_ids

_ANY = model_ids(1)[0]
_Lengths = tuple[list[int], list[float]]


def servegen(directory: Path, seconds: Seconds, seed: int) -> Iterator[Arrival]:
    """Yield the first `seconds` of every client of a directory, client by client. Raises ValueError for no client."""
    files = sorted(directory.glob("chunk-*-trace.csv"))
    if not files:
        raise ValueError(f"{directory}: no chunk-*-trace.csv of ServeGen in it")
    for file in files:
        name = file.name.removesuffix("-trace.csv")
        yield from _client(file, file.with_name(f"{name}-dataset.json"), seconds, Random(f"{seed}/{name}"))


def _client(trace: Path, dataset: Path, seconds: Seconds, stream: Random) -> Iterator[Arrival]:
    lengths = {float(at): (_pdf(row["input_tokens"]), _pdf(row["output_tokens"])) for at, row in _windows(dataset)}
    if not lengths:
        return
    tenant = TenantId(trace.name.removesuffix("-trace.csv"))
    with trace.open() as file:
        rows = [(float(row[0]), float(row[1]), row[3:]) for row in csv.reader(file) if row]
    for index, (start, rate, shape) in enumerate(rows):
        if start >= seconds:
            return
        end = min(seconds, rows[index + 1][0] if index + 1 < len(rows) else start + 600.0)
        inputs, outputs = lengths[max((at for at in lengths if at <= start), default=min(lengths))]
        at = start
        while rate > 0 and (at := at + _gap(rate, shape, stream)) < end:
            yield Arrival(at, _ANY, _draw(inputs, stream), _draw(outputs, stream), tenant)


def _windows(dataset: Path) -> list[tuple[str, Mapping[str, str]]]:
    return [(at, row) for at, row in json.loads(dataset.read_text()).items() if row]


def _gap(rate: float, shape: list[str], stream: Random) -> Seconds:
    """A gap of the window's distribution, whose first parameter is its shape; the mean is 1 / rate in any case."""
    if not shape or not shape[0] or len(shape) < 2 or not shape[1]:
        return stream.expovariate(rate)
    k = float(shape[1])
    if shape[0].lower() == "weibull":
        return stream.weibullvariate(1.0 / (rate * gamma(1.0 + 1.0 / k)), k)
    return stream.gammavariate(k, 1.0 / (rate * k))


def _pdf(text: str) -> _Lengths:
    parts = sorted(ast.literal_eval(text).items())
    return [max(1, int(length)) for length, _ in parts], list(accumulate(part for _, part in parts))


def _draw(lengths: _Lengths, stream: Random) -> int:
    (length,) = stream.choices(lengths[0], cum_weights=lengths[1])
    return length
