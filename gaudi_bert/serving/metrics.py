"""The Prometheus metrics of a server.

Metrics that text-embeddings-inference also provides have the same names.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gaudi_bert.serving.batch_shapes import Shape

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """The Prometheus metrics of one server. Each instance has its own registry.

    Args:
        queued: Returns the number of texts and the number of tokens that wait.
    """

    def __init__(self, queued: Callable[[], tuple[int, int]]) -> None:
        registry = self._registry = CollectorRegistry()

        def make_seconds_histogram(name: str, description: str) -> Histogram:
            """Register a histogram of durations in seconds, and return it."""
            return Histogram(name, description, registry=registry, buckets=_SECONDS)

        self.requests = Counter("te_request_count", "Requests.", ["method"], registry=registry)
        self.answered = Counter("te_request_success", "Requests that were answered.", ["method"], registry=registry)
        self.failed = Counter("te_request_failure", "Requests that were rejected or failed.", ["err"], registry=registry)
        self.request_seconds = make_seconds_histogram(
            "te_request_duration", "Seconds from the headers of a request to its answer."
        )
        self.tokenization_seconds = make_seconds_histogram(
            "te_request_tokenization_duration", "Seconds in which a request was tokenized."
        )
        self.queue_seconds = make_seconds_histogram(
            "te_request_queue_duration", "Seconds until a request's first text is computed."
        )
        self.inference_seconds = make_seconds_histogram(
            "te_request_inference_duration",
            "Seconds from the start of a request's first batch to the end of its last batch.",
        )
        self.tokens = Histogram("te_request_input_length", "Tokens in a text.", registry=registry, buckets=_COUNTS)
        self.batch_texts = Histogram("te_batch_next_size", "Texts in a batch.", registry=registry, buckets=_COUNTS)
        self.batch_tokens = Histogram("te_batch_next_tokens", "Tokens in a batch.", registry=registry, buckets=_COUNTS)
        self.batches = Counter("gaudi_bert_batches", "Batches, by their shape.", ["shape"], registry=registry)
        self.slots = Counter("gaudi_bert_slots", "Slots that were computed.", registry=registry)
        self.slot_tokens = Counter("gaudi_bert_slot_tokens", "Tokens in the slots that were computed.", registry=registry)
        self.device_seconds = Counter(
            "gaudi_bert_device_seconds", "Seconds in which the device computed.", registry=registry
        )
        self.disconnects = Counter(
            "gaudi_bert_disconnects", "Clients that disconnected before their answer.", registry=registry
        )
        Gauge("te_queue_size", "Waiting texts.", registry=registry).set_function(lambda: queued()[0])
        Gauge("gaudi_bert_queue_tokens", "Waiting tokens.", registry=registry).set_function(lambda: queued()[1])

    def count_batch(self, shape: Shape, slots: int, texts: int, tokens: int, seconds: float) -> None:
        """Record a computed batch in the metrics.

        Args:
            shape: The shape of the batch.
            slots: The number of slots that were computed.
            texts: The number of its texts.
            tokens: The number of its tokens.
            seconds: The seconds that it took.
        """
        self.batches.labels(str(shape)).inc()
        self.slots.inc(slots)
        self.slot_tokens.inc(tokens)
        self.device_seconds.inc(seconds)
        self.batch_texts.observe(texts)
        self.batch_tokens.observe(tokens)

    def render_page(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
