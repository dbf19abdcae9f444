"""What operators see: vLLM's metric names where they exist, `nearline_*` for what only a serverless platform has.

Labels are bounded: registered model ids, routes, states, error codes, and for promises the tenants with a key (at most
4096 rows, see promises.py); never request ids or adapters.
"""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nearline.protocol import ModelId, StartTimings, Usage

_FAST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_SLOW_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """All counters of one controller. Owns: the registry they live in."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model = ["model_name"]
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token.", model, _FAST_S)
        self.itl = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens.", model, _FAST_S)
        self.e2e = self._histogram("vllm:e2e_request_latency_seconds", "Whole request.", model, _SLOW_S)
        self.prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", model, _TOKENS)
        self.answer = self._histogram("vllm:request_generation_tokens", "Tokens per answer.", model, _TOKENS)
        self.prompt_total = self._counter("vllm:prompt_tokens", "Prompt tokens.", model)
        self.cached_total = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", model)
        self.answer_total = self._counter("vllm:generation_tokens", "Generated tokens.", model)
        self.success = self._counter("vllm:request_success", "Finished choices.", [*model, "finished_reason"])
        self.running = self._gauge("vllm:num_requests_running", "Requests in engines.", model)
        self.waiting = self._gauge("vllm:num_requests_waiting", "Requests not yet in an engine.", model)
        self.kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Used part of the KV cache, 0 to 1.", model)
        self.failures = self._counter("nearline_request_failures", "Requests that failed.", [*model, "code"])
        self.cold_starts = self._counter("nearline_cold_starts", "Instances started.", [*model, "tier"])
        self.load_s = self._histogram("nearline_load_seconds", "Time to read a checkpoint.", ["tier"], _SLOW_S)
        self.load_bytes = self._counter("nearline_load_bytes", "Bytes read to start instances.", ["tier"])
        self.holds = self._histogram("nearline_hold_seconds", "Wait for an instance, cold or busy.", model, _SLOW_S)
        self.instances = self._gauge("nearline_instances", "Instances by state.", [*model, "state"])
        self.nodes = self._gauge("nearline_nodes", "Connected nodes.", [])
        self.jobs = self._gauge("nearline_jobs", "Jobs: active, delayed, dead.", ["state"])
        self.http = self._counter("nearline_http_requests", "HTTP requests.", ["route", "method", "status"])
        self.in_flight = self._gauge("nearline_http_requests_in_flight", "HTTP requests now.", [])
        promise = [*model, "slo_class", "tenant", "outcome"]
        self.promises = self._gauge("nearline_slo_requests", "Requests by what became of their promise.", promise)
        self.coverage = self._gauge("nearline_wait_coverage", "Waits within their quantile.", [*model, "quantile"])
        about = "What the core did unseen: plans made, bettered, late; answers preempted; requests moved."
        self.decisions = self._gauge("nearline_decisions", about, ["kind"])
        self._models: dict[ModelId, ModelMetrics] = {}

    def _histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str]) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def of(self, model_id: ModelId) -> "ModelMetrics":
        """The counters of one registered model."""
        if model_id not in self._models:
            self._models[model_id] = ModelMetrics(self, model_id)
        return self._models[model_id]

    def started(self, model_id: ModelId, timings: StartTimings) -> None:
        """Count one start of an instance."""
        tier = timings.tier.value
        self.cold_starts.labels(model_id, tier).inc()
        self.load_s.labels(tier).observe(timings.read_s)
        self.load_bytes.labels(tier).inc(timings.read_bytes)

    def observe(self, snapshot: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Set the gauges from a snapshot of the fleet."""
        for gauge in (self.running, self.waiting, self.kv_usage, self.instances, self.promises, self.coverage):
            gauge.clear()
        self.nodes.set(sum(row["is_connected"] for row in snapshot["nodes"]))
        used: Counts[str] = Counts()
        total: Counts[str] = Counts()
        for row in snapshot["instances"]:
            self.instances.labels(row["model"], row["state"]).inc()
            used[row["model"]] += row["kv_tokens_used"]
            total[row["model"]] += row["kv_tokens_total"]
        for row in snapshot["models"]:
            self.running.labels(row["id"]).inc(row["num_running"])
            self.waiting.labels(row["id"]).inc(row["num_waiting"])
            if row["prediction"]["num_waits"] and not row["is_retired"]:
                for quantile, part in row["prediction"]["wait_coverage"].items():
                    self.coverage.labels(row["id"], quantile).set(part)
        for row in snapshot.get("decisions", ()):
            for kind, count in row.items():
                self.decisions.labels(kind).set(count)
        for row in snapshot.get("promises", ()):
            for outcome in ("met", "missed", "refused"):
                self.promises.labels(row["model"], row["slo_class"], row["tenant"], outcome).set(row[outcome])
        for model, tokens in total.items():
            self.kv_usage.labels(model).set(used[model] / tokens if tokens else 0.0)

    def forget(self, model_id: ModelId) -> None:
        """Drop everything labelled with a model that was removed."""
        self._models.pop(model_id, None)
        for metric in vars(self).values():
            if isinstance(metric, (Counter, Gauge, Histogram)) and "model_name" in metric._labelnames:
                metric.remove_by_labels({"model_name": model_id})

    def render(self) -> bytes:
        """Prometheus's text format."""
        text: bytes = generate_latest(self.registry)
        return text


class ModelMetrics:
    """The counters of one model, looked up once."""

    def __init__(self, metrics: Metrics, model_id: ModelId) -> None:
        self._metrics = metrics
        self._model_id = model_id
        self._ttft: Any = metrics.ttft.labels(model_id)
        self._itl: Any = metrics.itl.labels(model_id)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def held(self, seconds: float) -> None:
        self._metrics.holds.labels(self._model_id).observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def finished(self, seconds: float, usage: Usage, reasons: Sequence[str | None]) -> None:
        """Count one request that ended well."""
        all_of, name = self._metrics, self._model_id
        all_of.e2e.labels(name).observe(seconds)
        all_of.prompt.labels(name).observe(usage.num_prompt_tokens)
        all_of.answer.labels(name).observe(usage.num_completion_tokens)
        all_of.prompt_total.labels(name).inc(usage.num_prompt_tokens)
        all_of.cached_total.labels(name).inc(usage.num_cached_tokens)
        all_of.answer_total.labels(name).inc(usage.num_completion_tokens)
        for reason in reasons:
            all_of.success.labels(name, reason or "none").inc()

    def failed(self, code: str) -> None:
        """Count one request that was refused, cancelled or broke off, by error code."""
        self._metrics.failures.labels(self._model_id, code).inc()
