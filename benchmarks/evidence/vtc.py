"""Fair scheduling on the real trace of 27 clients: the published table, the recorded runs, and our counters.

Usage: python -m benchmarks.evidence.vtc --data DIRECTORY
The tenants' order is the controller's own `VirtualCounters`; lengths are predicted by its `LengthPredictor`. Requests
are those of the trace; the machine is the cost model fitted to that paper's A10G. Writes benchmarks/evidence/vtc.md.
Source: [vtc] recorded runs, cost profile, pool of 10,000 tokens; [slora] admission by the peak the batch will reach.
"""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks import record
from benchmarks.evidence import page
from benchmarks.evidence.options import data_directory
from nearline.controller.policy.fairness import VirtualCounters, spread_bound
from nearline.controller.policy.prediction import Features, LengthPredictor
from nearline.protocol import TenantId

POOL_TOKENS, MAX_TOKENS = 10_000, 1024
OVERHEAD = 1.1
SECONDS, WINDOW_S, STRIDE_S = 600.0, 60.0, 30.0
PUBLISHED = {
    "FCFS": ("759.97 / 433.53", "777"),
    "LCF": ("750.49 / 323.82", "778"),
    "VTC": ("368.40 / 251.66", "779"),
    "VTC_predict": ("365.47 / 240.33", "773"),
    "VTC_oracle": ("329.46 / 227.51", "781"),
}


@dataclass(slots=True, eq=False)
class Call:
    """One request of the trace and what became of it. `charged` output tokens were paid for on admission."""

    tenant: TenantId
    arrived_at: float
    num_input: int
    num_output: int
    first_at: float = 0.0
    ended_at: float = 0.0
    num_done: int = 0
    charged: float = 0.0

    @property
    def cost(self) -> int:
        return self.num_input + 2 * self.num_output

    @property
    def features(self) -> Features:
        return Features(self.tenant, None, self.num_input, MAX_TOKENS)


class NoLift(VirtualCounters):
    """Least counter first: a tenant comes back with the counter it left with."""

    def enter(self, tenant: TenantId) -> None:
        before = self.counter(tenant)
        super().enter(tenant)
        self._counters[tenant] = before


@dataclass
class Machine:
    """Continuous batching over a pool of tokens. `kind` names the policy; `worst` is the largest spread seen."""

    kind: str
    worst: float = 0.0

    def __post_init__(self) -> None:
        make = NoLift if self.kind == "LCF" else VirtualCounters
        self._counters, self._true = make(), make()
        self._lengths = LengthPredictor()
        self._waiting: dict[TenantId, deque[tuple[int, Call]]] = {}
        self._running: list[Call] = []

    def run(self, calls: list[Call]) -> None:
        coming, now, order = deque(sorted(calls, key=lambda call: call.arrived_at)), 0.0, 0
        while coming or self._running or any(self._waiting.values()):
            while coming and coming[0].arrived_at <= now:
                order += 1
                self._enter(order, coming.popleft())
            admitted = self._admit()
            if not self._running:
                now = max(now, coming[0].arrived_at)
                continue
            now += OVERHEAD * sum(0.0002137 * call.num_input + 0.000452 for call in admitted)
            context = sum(call.num_input + call.num_done for call in self._running)
            now += OVERHEAD * (0.0163 + 0.000245 * len(self._running) + 0.000002018 * context)
            self._step(now)

    def _enter(self, order: int, call: Call) -> None:
        for counters in (self._counters, self._true):
            counters.enter(call.tenant)
        self._waiting.setdefault(call.tenant, deque()).append((order, call))
        self.worst = max(self.worst, self._true.spread())

    def _admit(self) -> list[Call]:
        """Admit while the next request fits: first come first served, or the tenant whose turn it is."""
        admitted = []
        while tenants := [tenant for tenant, line in self._waiting.items() if line]:
            if self.kind == "FCFS":
                tenant = min(tenants, key=lambda t: self._waiting[t][0][0])
            else:
                tenant = self._counters.order(tenants)[0]
            call = self._waiting[tenant][0][1]
            if self._peak(call) > POOL_TOKENS:
                break
            self._waiting[tenant].popleft()
            if self.kind == "VTC_oracle":
                call.charged = call.num_output
            elif self.kind == "VTC_predict":
                call.charged = self._lengths.predict(call.features)
            self._counters.charge(tenant, call.num_input, call.charged)
            self._true.charge(tenant, call.num_input, 0)
            for counters in (self._counters, self._true):
                counters.leave(tenant)
            self._running.append(call)
            admitted.append(call)
            self.worst = max(self.worst, self._true.spread())
        return admitted

    def _peak(self, more: Call) -> int:
        """Most tokens the pool will hold if `more` joins and every request runs to its known end."""
        held, peak = 0, 0
        for n, call in enumerate(sorted([*self._running, more], key=lambda c: c.num_done - c.num_output), 1):
            held += call.num_input + call.num_done
            peak = max(peak, (call.num_output - call.num_done) * n + held)
        return peak

    def _step(self, now: float) -> None:
        for call in self._running:
            call.num_done += 1
            self._true.charge(call.tenant, 0, 1)
            if call.num_done == 1:
                call.first_at = now
            if call.num_done > call.charged:
                self._counters.charge(call.tenant, 0, min(1.0, call.num_done - call.charged))
            if call.num_done == call.num_output:
                call.ended_at = now
                self._counters.charge(call.tenant, 0, min(0.0, call.num_output - call.charged))
                self._lengths.learn(call.features, call.charged, call.num_output)
        self._running = [call for call in self._running if call.num_done < call.num_output]
        self.worst = max(self.worst, self._true.spread())


def difference(calls: Iterable[Call]) -> tuple[float, float]:
    """Largest and mean service difference over windows of 60 s every 30 s, in weighted tokens per second.

    In a window each tenant's difference is the smaller of (most served - served) and |asked - served|; a window's is
    their sum. Service is spread evenly from first token to end.
    """
    calls, found = list(calls), []
    tenants = sorted({call.tenant for call in calls})
    for k in range(int((SECONDS - WINDOW_S) / STRIDE_S) + 1):
        begin, end = k * STRIDE_S, k * STRIDE_S + WINDOW_S
        served, asked = dict.fromkeys(tenants, 0.0), dict.fromkeys(tenants, 0.0)
        for call in calls:
            overlap = max(0.0, min(end, call.ended_at) - max(begin, call.first_at))
            served[call.tenant] += call.cost * overlap / max(1e-9, call.ended_at - call.first_at)
            asked[call.tenant] += call.cost if begin <= call.arrived_at < end else 0.0
        most = max(served.values())
        found.append(sum(min(most - served[t], abs(asked[t] - served[t])) for t in tenants) / WINDOW_S)
    return max(found), fmean(found)


def recorded(path: Path) -> list[Call]:
    """Read a recorded run."""
    calls = []
    for row in json.loads(path.read_text().splitlines()[0])["result"]["responses"]:
        at = float(row["req_time"])
        call = Call(TenantId(row["adapter_dir"]), at, max(1, row["prompt_len"]), max(1, row["output_len"]))
        call.first_at, call.ended_at = at + row["first_token_latency"], at + row["request_latency"]
        calls.append(call)
    return calls


def tokens_per_s(calls: list[Call]) -> float:
    return sum(call.num_input + call.num_output for call in calls) / max(call.ended_at for call in calls)


WHY = """Difference: largest / mean over windows, weighted tokens (input + 2 × output) per second; rate: tokens per
second over the whole run. "Recorded" applies our reading of the metric to the published raw runs, so it shows what the
metric alone changes; "ours" are the same requests through our policies and the fitted cost model, which batches a
little differently. Spread: the largest distance ever between the true counters of tenants that wait, every token
charged once. The theorem bounds it for VTC by U = {bound:,.0f}; first come, first served and least counter first are
the controls: they must exceed U. Predictions are our online ones, learned within the run."""


def main(directory: Path) -> Path:
    bound = spread_bound(MAX_TOKENS, POOL_TOKENS)
    rows = []
    for kind, (published, rate) in PUBLISHED.items():
        real = recorded(directory / "vtc" / f"real_{kind}.jsonl")
        ours = [Call(c.tenant, c.arrived_at, c.num_input, c.num_output) for c in real]
        machine = Machine(kind)
        machine.run(ours)
        cells = [f"{most:.0f} / {mean:.0f}" for most, mean in (difference(real), difference(ours))]
        verdict = "≤ U" if machine.worst <= bound else "> U"
        rows.append([kind.replace("_", " "), published, *cells, rate, f"{tokens_per_s(real):.0f}",
                     f"{tokens_per_s(ours):.0f}", f"{machine.worst:,.0f} ({verdict})"])  # fmt: skip
    header = ["policy", "published", "recorded, our metric", "ours", "published rate", "recorded rate", "our rate",
              "spread"]  # fmt: skip
    command = "python -m benchmarks.evidence.vtc --data DIRECTORY"
    parts = [record.table(header, rows), WHY.format(bound=bound)]
    return page.write("vtc", "Fairness on the real trace (27 clients, 1,500 requests, 600 s)", command, parts)


if __name__ == "__main__":
    print(main(data_directory(__doc__)))
