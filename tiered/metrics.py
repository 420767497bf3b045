"""The metrics that are served to Prometheus: their table, from which docs/metrics.md is made, and what serves them.

``prometheus_client`` has the text form, the histograms and the process's own metrics; it is loaded when they are wanted.
"""

from __future__ import annotations

import enum
import platform
from dataclasses import field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from prometheus_client import Histogram
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricType(enum.Enum):
    """What the number does."""

    GAUGE = "gauge"
    """Goes up and down."""
    COUNTER = "counter"
    """Only grows, from 0 at the start of the process."""
    HISTOGRAM = "histogram"
    """How often a duration was how long: ``_bucket``, ``_sum`` and ``_count``."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str  # with the unit last (``_total`` after it for counters)
    kind: MetricType  # gauge or counter
    help: str  # what it says, and what to do about it where that is not plain
    labels: tuple[str, ...] = ()  # names of its labels
    buckets: tuple[float, ...] = ()  # of a histogram: upper bounds but for infinity, in its unit


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric at one moment."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


_G, _C, _H = MetricType.GAUGE, MetricType.COUNTER, MetricType.HISTOGRAM
_REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COMMIT_BUCKETS_S = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)

PROCESS_METRICS: tuple[Metric, ...] = (
    Metric(
        "tiered_build_info",
        _G,
        "Always 1.",
        ("version", "python"),
    ),
    Metric("process_cpu_seconds_total", _C, "CPU time used."),
    Metric("process_resident_memory_bytes", _G, "Resident memory."),
    Metric("process_virtual_memory_bytes", _G, "Virtual memory."),
    Metric("process_open_fds", _G, "Open file descriptors."),
    Metric("process_max_fds", _G, "Limit of open file descriptors."),
    Metric("process_start_time_seconds", _G, "Start of the process, Unix time."),
)
"""Of every process that serves metrics."""

METRICS: tuple[Metric, ...] = (
    Metric("tiered_up", _G, "1 while messages are tiered, 0 once this process has given up."),
    Metric(
        "tiered_lag_messages", _G, "Messages committed locally but not yet in the tier.", ("topic",)
    ),
    Metric("tiered_lag_bytes", _G, "Their size.", ("topic",)),
    Metric(
        "tiered_lag_seconds",
        _G,
        "Age of the oldest such message; normally about the freshness. Alert on it.",
        ("topic",),
    ),
    Metric(
        "tiered_topic_rate_bytes",
        _G,
        "Bytes per second to which a rule's `rate` limits the topic.",
        ("topic",),
    ),
    Metric(
        "tiered_waiting_records",
        _G,
        "Pending records: not proven committed.",
    ),
    Metric("tiered_waiting_bytes", _G, "Their known size."),
    Metric("tiered_committed_messages_total", _C, "Queue offsets made durable, holes included."),
    Metric("tiered_committed_bytes_total", _C, "Bytes of records made durable."),
    Metric("tiered_parts_total", _C, "Parts committed: what one round took of one queue."),
    Metric("tiered_bundles_total", _C, "Objects that hold them."),
    Metric("tiered_rounds_total", _C, "Journal entries that committed parts."),
    Metric(
        "tiered_commit_seconds",
        _H,
        "From reading a journal entry's oldest message until it is durable; normally up to the freshness and an upload.",
        (),
        _COMMIT_BUCKETS_S,
    ),
    Metric(
        "tiered_unmirrored_checkpoints_total",
        _C,
        "Checkpoints without a copy in meta/journal/.",
    ),
    Metric("tiered_epoch", _G, "Epoch of this writer."),
    Metric(
        "tiered_requests_total",
        _C,
        "Requests to the object store, failed ones included.",
        ("kind",),
    ),
    Metric(
        "tiered_request_errors_total",
        _C,
        "Failed requests, expected answers not counted.",
        ("kind", "error"),
    ),
    Metric(
        "tiered_request_seconds",
        _H,
        "Duration of requests, failed ones included.",
        ("kind",),
        _REQUEST_BUCKETS_S,
    ),
    Metric("tiered_transfer_bytes_total", _C, "Bytes up or down.", ("direction",)),
    Metric(
        "tiered_request_dollars_total",
        _C,
        "Approximate cost of the requests at list prices, in US dollars.",
    ),
    Metric(
        "tiered_request_retries_total",
        _C,
        "Retried reads, listings and lease requests.",
    ),
    Metric(
        "tiered_upload_failures_total",
        _C,
        "Uploads that failed or have an unknown outcome; each is repeated as another object, and may leave an"
        " orphan.",
    ),
    Metric(
        "tiered_file_switches_total",
        _C,
        "Segments rolled after a failed upload: one for each queue in the bundle.",
    ),
    Metric(
        "tiered_store_trouble_seconds",
        _G,
        "How long the object store has refused or failed: `permission` (keys or policy), `clock` (this machine's),"
        " `encryption` (key service), `archived` (objects in an archive class), `settings` (bucket, region,"
        " endpoint), `full`, `trust` (certificate), `unreachable`, `failing`.",
        ("reason",),
    ),
    Metric(
        "tiered_silent_seconds",
        _G,
        "How long no upload has succeeded though there was something to upload.",
    ),
    Metric(
        "tiered_lock_misses_total",
        _C,
        "Batches left to compensation because of a busy queue.",
    ),
    Metric(
        "tiered_compensated_total", _C, "Batches that compensation read from the broker's store."
    ),
    Metric(
        "tiered_sealed_segments_total",
        _C,
        "Segments sealed for age or size, or on request (`--seal`).",
    ),
    Metric("tiered_compaction_passes_total", _C, "Passes of `attach --compact` over queues."),
    Metric(
        "tiered_compaction_failures_total",
        _C,
        "Failed compaction rounds; they are retried.",
    ),
    Metric("tiered_compaction_seconds_total", _C, "Duration of compaction rounds."),
    Metric(
        "tiered_compaction_gone_messages_total",
        _C,
        "Messages replaced by newer ones of the same key.",
    ),
    Metric("tiered_compaction_rewritten_bytes_total", _C, "Bytes of records rewritten."),
    Metric("tiered_compaction_keys", _G, "Distinct keys in the last round."),
    Metric(
        "tiered_compaction_map_use_ratio",
        _G,
        "Keys of the largest queue relative to --map-size; above 1 it is read several times.",
    ),
    Metric(
        "tiered_compaction_dirty_ratio",
        _G,
        "Largest share of new data in a queue after the last round.",
    ),
    Metric(
        "tiered_compaction_last_timestamp_seconds",
        _G,
        "End of the last successful round, Unix time, or 0.",
    ),
    Metric("tiered_merged_bundles_total", _C, "Objects made by merging."),
    Metric("tiered_merged_parts_total", _C, "Parts merged into these."),
    Metric(
        "tiered_merged_bytes_total",
        _C,
        "Bytes merged, before compression; relative to `tiered_committed_bytes_total`: write amplification.",
    ),
    Metric("tiered_merged_stored_bytes_total", _C, "Bytes of the objects made."),
    Metric(
        "tiered_merge_retries_total",
        _C,
        "Failed merges; they are retried.",
    ),
    Metric(
        "tiered_unmergeable_bundles_total",
        _C,
        "Objects not merged because of damage. Above 0 run `tiered verify --deep`.",
    ),
    Metric("tiered_index_objects_total", _C, "Key index objects made."),
    Metric("tiered_index_keys_total", _C, "Keys in them."),
    Metric("tiered_index_bytes_total", _C, "Their size."),
    Metric(
        "tiered_index_waiting_messages",
        _G,
        "Tiered messages not indexed yet.",
    ),
    Metric("tiered_index_failures_total", _C, "Failures of the key index."),
    Metric(
        "tiered_timers_up",
        _G,
        "1 while timers are imported, 0 while that fails.",
    ),
    Metric(
        "tiered_timers_oldest_seconds",
        _G,
        "Age of the oldest timer record neither imported nor left to the broker. Alert on it.",
    ),
    Metric("tiered_timers_waiting_records", _G, "Number of such records."),
    Metric("tiered_timers_taken_total", _C, "Timers imported."),
    Metric(
        "tiered_gaps_total",
        _C,
        "Gaps: the broker deleted messages before they were tiered.",
    ),
    Metric(
        "tiered_truncated_total",
        _C,
        "Queues truncated because the broker has other messages from some offset on.",
    ),
    Metric(
        "tiered_begun_anew_total",
        _C,
        "Queues begun anew because their topic was recreated.",
    ),
    Metric(
        "tiered_ahead_queues",
        _G,
        "Queues in which the tier is ahead of the broker: a lagging replica, or a truncated topic.",
    ),
    Metric(
        "tiered_quarantined_records_total",
        _C,
        "Damaged records of the broker's store. Above 0 check the disk.",
    ),
    Metric(
        "tiered_missing_messages_total",
        _C,
        "Queue offsets for which the broker's store has no message.",
    ),
    Metric("tiered_buffer_bytes", _G, "Memory held for records and uploads."),
    Metric("tiered_buffer_bytes_max", _G, "Its limit; at it, following pauses."),
)

MOUNT_METRICS: tuple[Metric, ...] = (
    Metric("tiered_mount_up", _G, "1 while clients are served and the tier can be read."),
    Metric("tiered_mount_connections", _G, "Client connections."),
    Metric(
        "tiered_mount_refused_connections_total",
        _C,
        "Connections beyond --connections.",
    ),
    Metric(
        "tiered_mount_dropped_connections_total",
        _C,
        "Connections closed because of the client: `frame` (invalid), `silence`, `slow`, `cut` (within a frame), `network`.",
        ("reason",),
    ),
    Metric("tiered_mount_requests_total", _C, "Client requests, by name.", ("request",)),
    Metric(
        "tiered_mount_denied_requests_total",
        _C,
        "Requests refused by access rules: `unsigned`, `unknown` (or disabled user), `signature`, `permission`.",
        ("reason",),
    ),
    Metric(
        "tiered_mount_rules_trouble",
        _G,
        "1 while changed `--acl` files cannot be read; the previous rules hold.",
    ),
    Metric(
        "tiered_mount_request_seconds",
        _H,
        "From a request to its answer, holding included.",
        ("request",),
        _REQUEST_BUCKETS_S,
    ),
    Metric(
        "tiered_mount_answers_total",
        _C,
        "Answers; `other`: passed on from a consumer.",
        ("code",),
    ),
    Metric("tiered_mount_sent_bytes_total", _C, "Bytes of answers."),
    Metric(
        "tiered_mount_pulls_total",
        _C,
        "Pulls; `TRY_AGAIN`: the tier did not answer, `OFFSET_FOUND_NULL`: damaged there.",
        ("status",),
    ),
    Metric(
        "tiered_mount_skipped_messages_total",
        _C,
        "Queue offsets skipped because of gaps and damage.",
    ),
    Metric(
        "tiered_mount_read_bytes_total",
        _C,
        "Bytes served from the `tier`, or `local` (a living broker's store).",
        ("side",),
    ),
    Metric(
        "tiered_mount_replica_handed_back_total",
        _C,
        "Pulls sent to the master.",
    ),
    Metric(
        "tiered_mount_replica_passed_on_total",
        _C,
        "Requests forwarded to the master.",
    ),
    Metric(
        "tiered_mount_replica_master_known",
        _G,
        "1 while a name server knows the master.",
    ),
    Metric("tiered_mount_held_requests", _G, "Pulls held by long polling."),
    Metric("tiered_mount_held_pops", _G, "Pops held by long polling."),
    Metric(
        "tiered_mount_popped_messages_in_flight",
        _G,
        "Messages popped but not acknowledged.",
    ),
    Metric("tiered_mount_in_flight_bytes", _G, "Bytes of requests and answers in progress."),
    Metric("tiered_mount_groups", _G, "Groups with consumers here."),
    Metric("tiered_mount_consumers", _G, "Consumers here."),
    Metric("tiered_mount_topics", _G, "Topics served."),
    Metric(
        "tiered_mount_snapshots_total",
        _C,
        "Snapshots of consumer offsets written.",
    ),
    Metric(
        "tiered_mount_keeps_offsets",
        _G,
        "0 while consumer offsets are only in memory, because they or the lease are refused.",
    ),
    Metric(
        "tiered_mount_sent_back_total",
        _C,
        "Messages that consumers sent back.",
    ),
    Metric(
        "tiered_mount_given_again_total",
        _C,
        "Of these, delivered to retry topics.",
    ),
    Metric(
        "tiered_mount_pending_retries",
        _G,
        "Messages of the retry log not due or not durable yet.",
    ),
    Metric(
        "tiered_mount_name_servers",
        _G,
        "1 while registered with this name server.",
        ("address",),
    ),
    *(
        metric
        for metric in METRICS
        if metric.name
        in {
            "tiered_requests_total",
            "tiered_request_errors_total",
            "tiered_request_seconds",
            "tiered_transfer_bytes_total",
            "tiered_request_dollars_total",
            "tiered_request_retries_total",
        }
    ),
)
"""Of a mount; what it asks of the object store has the names that it has everywhere."""

BROKER = "broker"
"""The label that tells a fleet's mounts apart."""

_OF_A_MEMBER: tuple[Metric, ...] = (
    Metric("tiered_fleet_members", _G, "Live members of the fleet."),
    Metric("tiered_fleet_brokers", _G, "Brokers assigned to this member."),
    Metric(
        "tiered_fleet_failed_brokers",
        _G,
        "Of these, not mounted; they are retried.",
    ),
    Metric(
        "tiered_fleet_living_brokers",
        _G,
        "Of these, not decommissioned and so left alone.",
    ),
)

FLEET_METRICS: tuple[Metric, ...] = (
    *_OF_A_MEMBER,
    *(replace(metric, labels=(*metric.labels, BROKER)) for metric in MOUNT_METRICS),
)
"""Of a member of a fleet: those of a mount, each with its broker (`cluster/broker`), and some of its own."""


TIMER_METRICS: tuple[Metric, ...] = (
    Metric("tiered_timer_up", _G, "1 while timers are delivered, 0 while tier or target fail."),
    Metric(
        "tiered_timer_pending_messages",
        _G,
        "Timers not yet handed over.",
    ),
    Metric("tiered_timer_pending_hours", _G, "Hours that hold them."),
    Metric(
        "tiered_timer_next_due_seconds",
        _G,
        "Time until the first such hour; negative: it has begun.",
    ),
    Metric(
        "tiered_timer_waiting_messages",
        _G,
        "Handed over, not yet due.",
    ),
    Metric(
        "tiered_timer_lateness_seconds",
        _G,
        "Greatest lateness of a delivery since the start.",
    ),
    Metric("tiered_timer_handed_messages_total", _C, "Messages handed over."),
    Metric(
        "tiered_timer_found_messages_total",
        _C,
        "Messages of an interrupted batch that the target had.",
    ),
    Metric("tiered_timer_refused_messages_total", _C, "Messages that the target refuses for good."),
    Metric(
        "tiered_timer_missing_messages_total",
        _C,
        "Messages lost from their hour's file or the target.",
    ),
    Metric(
        "tiered_timer_held_messages",
        _G,
        "Messages held back because of damage. Above 0 repair the timers' objects.",
    ),
    Metric(
        "tiered_timer_dropped_messages_total",
        _C,
        "Cancelled messages, and cancellations.",
    ),
    Metric("tiered_timer_retries_total", _C, "Batches sent again."),
    Metric(
        "tiered_timer_delivered_messages_total",
        _C,
        "Messages delivered.",
    ),
    *(
        metric
        for metric in MOUNT_METRICS
        if metric.name.startswith(("tiered_request", "tiered_transfer"))
    ),
)
"""Of ``tiered timer run``."""


class Exposition:
    """What a process serves: samples taken when it is asked, durations measured meanwhile, and the process itself.

    Any thread may call anything.
    """

    def __init__(
        self,
        metrics: Iterable[Metric],
        samples: Callable[[], Iterable[Sample]],
        *,
        of_process: bool = True,
    ) -> None:
        """``samples``: taken at each scrape; ``of_process``: with ``PROCESS_METRICS``.

        Raises:
            InvalidError: ``prometheus_client`` is not installed.
        """
        try:
            import prometheus_client  # noqa: PLC0415 (loaded when metrics are wanted)
        except ImportError as error:
            raise InvalidError(
                "metrics need prometheus-client, which is not installed",
                do="pip install 'tieredmq[metrics]', or leave --metrics-listen and --metrics-file out",
            ) from error
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the process's own start says it
        self._client = prometheus_client
        self._table = {metric.name: metric for metric in metrics}
        self._samples = samples
        self._of_process = of_process
        self._registry = prometheus_client.CollectorRegistry()
        if of_process:
            prometheus_client.ProcessCollector(registry=self._registry)
            self._table[_BUILD.name] = _BUILD
        self._registry.register(_Samples(self.families))
        self._histograms: dict[str, Histogram] = {}

    def timing(self, name: str, **labels: str) -> AbstractContextManager[object]:
        """Measure how long a block takes, for a histogram of the table."""
        return self._histogram(name, labels).time()

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Note how long something took, for a histogram of the table."""
        self._histogram(name, labels).observe(seconds)

    def _histogram(self, name: str, labels: Mapping[str, str]) -> Histogram:
        found = self._histograms.get(name)
        if found is None:
            metric = self._table[name]
            found = self._client.Histogram(
                name, metric.help, metric.labels, registry=None, buckets=metric.buckets
            )
            # Two threads may make one each: one of the two is kept.
            found = self._histograms.setdefault(name, found)
        return found.labels(**labels) if labels else found

    def text(self) -> str:
        """The text that Prometheus reads."""
        return self._client.generate_latest(self._registry).decode()

    def families(self) -> Iterator[Family]:
        """Everything of the table, in its order; what has no sample is left out.

        Raises:
            KeyError: A sample of a metric that is not in the table, or without one of its labels.
        """
        rows: dict[str, list[Sample]] = {name: [] for name in self._table}
        for sample in self._samples():
            rows[sample.name].append(sample)
        if self._of_process:
            said = {"version": version("tieredmq"), "python": platform.python_version()}
            rows[_BUILD.name].append(Sample(_BUILD.name, 1, said))
        for name, found in rows.items():
            if found:
                yield self._family(self._table[name], found)
            elif name in self._histograms:
                yield from self._histograms[name].collect()

    def _family(self, metric: Metric, samples: Iterable[Sample]) -> Family:
        core = self._client.metrics_core
        said = metric.name, metric.help
        family: CounterMetricFamily | GaugeMetricFamily = (
            core.CounterMetricFamily(*said, labels=metric.labels)
            if metric.kind is MetricType.COUNTER
            else core.GaugeMetricFamily(*said, labels=metric.labels)
        )
        for sample in samples:
            family.add_metric([_told(sample.labels[name]) for name in metric.labels], sample.value)
        return family


def render(samples: Iterable[Sample], metrics: Iterable[Metric] = METRICS) -> str:
    """The text that Prometheus reads, of these samples alone; as ``Exposition``."""
    return Exposition(metrics, lambda: samples, of_process=False).text()


@dataclass(frozen=True, slots=True)
class _Samples:
    """What a registry asks for families."""

    collect: Callable[[], Iterator[Family]]

    def describe(self) -> Iterable[Family]:
        """Nothing: else a registry would take samples before anything is there to be measured."""
        return ()


_BUILD = PROCESS_METRICS[0]


def _told(value: str) -> str:
    """A label's value; bytes that are no UTF-8 become U+FFFD."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
