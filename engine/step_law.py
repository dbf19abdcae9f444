"""Fits a law y = Σ xᵢ·fᵢ with no negative xᵢ to measurements, once or for ever anew. Pure.

Minimises the relative errors (a step of 2 ms counts as much as one of 2 s) by cyclic descent over the coefficients,
which needs only the sums of products kept here. Old measurements fade; anchors, made of what was believed before,
do not, so coefficients of which nothing is measured any more stay where they are.
"""

from collections.abc import Iterable, Sequence

_SWEEPS_TO_FIT = 4000


class Law:
    """Coefficients of one law, and the fading sums they follow from."""

    def __init__(self, coefficients: Sequence[float]) -> None:
        self.coefficients = list(coefficients)
        size = range(len(self.coefficients))
        self._fixed = [[0.0 for _ in size] for _ in size], [0.0 for _ in size]
        self._fading = [[0.0 for _ in size] for _ in size], [0.0 for _ in size]

    def predict(self, features: Sequence[float]) -> float:
        return sum(x * f for x, f in zip(self.coefficients, features, strict=True))

    def anchor(self, features: Sequence[float], weight: float) -> None:
        """Hold on to what the coefficients say now about a step with these features."""
        _add(self._fixed, features, self.predict(features), weight)

    def observe(self, features: Sequence[float], measured: float, fade: float = 1.0) -> None:
        """Take in one measurement, > 0; earlier ones count `fade` as much as before."""
        gram, right = self._fading
        for row in gram:
            row[:] = [fade * value for value in row]
        right[:] = [fade * value for value in right]
        _add(self._fading, features, measured, 1.0)

    def settle(self, num_sweeps: int) -> None:
        """Move the coefficients towards the best ones."""
        x = self.coefficients
        gram = [
            [a + b for a, b in zip(*rows, strict=True)] for rows in zip(self._fixed[0], self._fading[0], strict=True)
        ]
        right = [a + b for a, b in zip(self._fixed[1], self._fading[1], strict=True)]
        for _ in range(num_sweeps):
            for i, row in enumerate(gram):
                if row[i] > 0.0:
                    rest = sum(row[j] * x[j] for j in range(len(x)) if j != i)
                    x[i] = max(0.0, (right[i] - rest) / row[i])


def fit(points: Iterable[tuple[Sequence[float], float]]) -> tuple[list[float], float]:
    """Fit (features, measured) pairs; return the coefficients and the mean relative error that is left."""
    rows = list(points)
    law = Law([0.0] * len(rows[0][0]))
    for features, measured in rows:
        law.observe(features, measured)
    law.settle(_SWEEPS_TO_FIT)
    errors = [abs(law.predict(features) - measured) / measured for features, measured in rows]
    return law.coefficients, sum(errors) / len(errors)


def _add(
    sums: tuple[list[list[float]], list[float]], features: Sequence[float], measured: float, weight: float
) -> None:
    if measured <= 0.0:
        return
    gram, right = sums
    relative = [feature / measured for feature in features]
    for i, a in enumerate(relative):
        right[i] += weight * a
        for j, b in enumerate(relative):
            gram[i][j] += weight * a * b
