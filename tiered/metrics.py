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
        "tiered_build_info", _G, "1; its labels say which version this is.", ("version", "python")
    ),
    Metric("process_cpu_seconds_total", _C, "Processor time that the process took."),
    Metric("process_resident_memory_bytes", _G, "Memory of the whole process."),
    Metric("process_virtual_memory_bytes", _G, "Its address space."),
    Metric("process_open_fds", _G, "Open files and sockets."),
    Metric("process_max_fds", _G, "Their limit."),
    Metric("process_start_time_seconds", _G, "When it began, Unix time."),
)
"""Of every process that serves metrics."""

METRICS: tuple[Metric, ...] = (
    Metric("tiered_up", _G, "1 while messages are tiered, 0 when this process has given up."),
    Metric(
        "tiered_lag_messages", _G, "Messages committed locally and not yet in the tier.", ("topic",)
    ),
    Metric("tiered_lag_bytes", _G, "Bytes of their records.", ("topic",)),
    Metric(
        "tiered_lag_seconds",
        _G,
        "Age of the oldest of them, the greatest of the topic's queues. Alert on this one: normal is"
        " about the freshness.",
        ("topic",),
    ),
    Metric(
        "tiered_waiting_records",
        _G,
        "Records in the store that are not proven committed; they are looked at again.",
    ),
    Metric("tiered_waiting_bytes", _G, "Their bytes, as far as known."),
    Metric("tiered_committed_messages_total", _C, "Queue offsets made durable, holes included."),
    Metric("tiered_committed_bytes_total", _C, "Bytes of records made durable."),
    Metric("tiered_parts_total", _C, "Parts committed: what one round took of one queue."),
    Metric("tiered_bundles_total", _C, "Bundles that they lie in, each one object."),
    Metric("tiered_rounds_total", _C, "Journal entries that made parts durable."),
    Metric(
        "tiered_commit_seconds",
        _H,
        "From when the oldest message of a journal entry was read to when the entry was durable: normal is up to the"
        " freshness and an upload.",
        (),
        _COMMIT_BUCKETS_S,
    ),
    Metric(
        "tiered_unmirrored_checkpoints_total",
        _C,
        "Checkpoints without a second copy below meta/journal/; a lost journal would be rebuilt from an older one.",
    ),
    Metric("tiered_epoch", _G, "Epoch of this writer."),
    Metric(
        "tiered_requests_total", _C, "Requests to the object store, failed ones too.", ("kind",)
    ),
    Metric(
        "tiered_request_errors_total",
        _C,
        "Requests that failed, by class of the error. Answers that are asked for (an object that is not there yet or is"
        " there already, another version) are none.",
        ("kind", "error"),
    ),
    Metric(
        "tiered_request_seconds",
        _H,
        "How long requests to the object store took, failed ones too; of a listing, its first page.",
        ("kind",),
        _REQUEST_BUCKETS_S,
    ),
    Metric("tiered_transfer_bytes_total", _C, "Bytes of bodies, up or down.", ("direction",)),
    Metric(
        "tiered_request_dollars_total",
        _C,
        "About what the requests cost at list prices, in US dollars; storage is not in it.",
    ),
    Metric(
        "tiered_request_retries_total",
        _C,
        "Requests made again because one failed: reads, listings and the lease. Uploads and journal entries have"
        " their own retry counters and are not included.",
    ),
    Metric(
        "tiered_upload_failures_total",
        _C,
        "Uploads that failed or whose outcome is unknown; each is made again as another object.",
    ),
    Metric(
        "tiered_file_switches_total",
        _C,
        "Segments begun anew after a failed upload (Non-StopWrite).",
    ),
    Metric(
        "tiered_store_trouble_seconds",
        _G,
        "How long the object store has not done what it was asked, by reason: `permission` (keys or policy), `clock`"
        " (this machine's), `encryption` (the key service), `archived` (objects moved to an archive class), `settings`"
        " (bucket, region, endpoint), `full`, `trust` (its certificate), `unreachable`, `failing`; 0 when that does not"
        " hold. Tiering goes on by itself when"
        " it ends.",
        ("reason",),
    ),
    Metric(
        "tiered_silent_seconds",
        _G,
        "How long nothing could be uploaded although there was something to upload.",
    ),
    Metric(
        "tiered_lock_misses_total",
        _C,
        "Batches that dispatch left to compensation because their queue was busy.",
    ),
    Metric("tiered_compensated_total", _C, "Batches that compensation read from the local store."),
    Metric(
        "tiered_sealed_segments_total",
        _C,
        "Open segments that were sealed though nothing came behind them: old or full ones, and on request (`--seal`).",
    ),
    Metric("tiered_compaction_passes_total", _C, "Passes of `attach --compact` over queues."),
    Metric(
        "tiered_compaction_failures_total",
        _C,
        "Rounds of compaction that ended with an error; the log says why, and each is tried again.",
    ),
    Metric("tiered_compaction_seconds_total", _C, "Time that rounds of compaction took."),
    Metric(
        "tiered_compaction_gone_messages_total",
        _C,
        "Messages that newer ones of their key have replaced.",
    ),
    Metric("tiered_compaction_rewritten_bytes_total", _C, "Bytes of records written again."),
    Metric("tiered_compaction_keys", _G, "Distinct keys that the last round looked at."),
    Metric(
        "tiered_compaction_map_use_ratio",
        _G,
        "Keys of the last round's largest queue per what the map holds; above 1 a queue is read several times.",
    ),
    Metric(
        "tiered_compaction_dirty_ratio",
        _G,
        "The greatest share of a queue that is new, after the last round; above --dirty-ratio it waits to be compacted.",
    ),
    Metric(
        "tiered_compaction_last_timestamp_seconds",
        _G,
        "When the last round ended well, Unix time; 0: none did.",
    ),
    Metric("tiered_merged_bundles_total", _C, "Bundles made by merging."),
    Metric("tiered_merged_parts_total", _C, "Parts that were gathered into these."),
    Metric(
        "tiered_merged_bytes_total",
        _C,
        "Bytes of those, records and index, before compression. Beside `tiered_committed_bytes_total` they say how often"
        " a byte is rewritten.",
    ),
    Metric("tiered_merged_stored_bytes_total", _C, "Bytes of the bundles made of them."),
    Metric(
        "tiered_merge_retries_total",
        _C,
        "Tries of merging that the store did not carry out; each is tried again.",
    ),
    Metric(
        "tiered_unmergeable_bundles_total",
        _C,
        "Bundles left as they are, because something in them is damaged or gone. Above 0 run `tiered verify"
        " --deep`.",
    ),
    Metric("tiered_index_objects_total", _C, "Objects of the key index made and named."),
    Metric("tiered_index_keys_total", _C, "Keys in them."),
    Metric("tiered_index_bytes_total", _C, "Their bytes."),
    Metric(
        "tiered_index_waiting_messages",
        _G,
        "Messages in the tier whose keys are neither indexed nor collected.",
    ),
    Metric("tiered_index_failures_total", _C, "Tries of the key index that failed."),
    Metric(
        "tiered_timers_up", _G, "Of attach --timers: 1 while timers are taken, 0 while it fails."
    ),
    Metric(
        "tiered_timers_oldest_seconds",
        _G,
        "Age of the oldest record of the timer topics that is neither in the tier nor known to stay with the broker. Alert.",
    ),
    Metric("tiered_timers_waiting_records", _G, "How many such records there are."),
    Metric("tiered_timers_taken_total", _C, "Timers taken into the tier."),
    Metric(
        "tiered_gaps_total",
        _C,
        "Gaps recorded because local retention was faster. Above 0 messages are lost to the tier.",
    ),
    Metric(
        "tiered_truncated_total",
        _C,
        "Times that a queue was ended at an earlier offset, because the broker has other messages from there on"
        " (power failure, another master, a backup). Above 0 a person should know why.",
    ),
    Metric(
        "tiered_begun_anew_total",
        _C,
        "Times that a queue began anew, because the broker has nothing of its history any more (its topic was"
        " deleted and created again).",
    ),
    Metric(
        "tiered_ahead_queues",
        _G,
        "Queues of which the tier has more than the local store, and nothing else: a copy that lags, or a topic"
        " that was cut. It is looked at again when it grows.",
    ),
    Metric(
        "tiered_quarantined_records_total",
        _C,
        "Damaged local records put into quarantine. Above 0 a person should look at the disk.",
    ),
    Metric(
        "tiered_missing_messages_total",
        _C,
        "Queue offsets of which the local store should have a message, and has nothing. Above 0 a person should look.",
    ),
    Metric("tiered_buffer_bytes", _G, "Memory held for records and uploads."),
    Metric("tiered_buffer_bytes_max", _G, "Its limit; at it, following pauses."),
)

MOUNT_METRICS: tuple[Metric, ...] = (
    Metric("tiered_mount_up", _G, "1 while clients are served and the tier can be looked at."),
    Metric("tiered_mount_connections", _G, "Connections of clients."),
    Metric(
        "tiered_mount_refused_connections_total", _C, "Connections refused: there were too many."
    ),
    Metric(
        "tiered_mount_dropped_connections_total",
        _C,
        "Connections ended for what the client did: `frame` (no frame of this protocol), `silence`, `slow` (takes no"
        " answers), `cut` (within a frame), `network`.",
        ("reason",),
    ),
    Metric("tiered_mount_requests_total", _C, "Requests of clients, by name.", ("request",)),
    Metric(
        "tiered_mount_denied_requests_total",
        _C,
        "Requests refused by the rules of access (`--acl`): `unsigned` (no access key), `unknown` (nobody's access key, or a"
        " disabled user), `signature` (a wrong one), `permission`.",
        ("reason",),
    ),
    Metric(
        "tiered_mount_rules_trouble",
        _G,
        "1 while the files of `--acl` have changed and cannot be read: the rules before stay in force.",
    ),
    Metric(
        "tiered_mount_request_seconds",
        _H,
        "From a request to its answer; the time that a request is held counts.",
        ("request",),
        _REQUEST_BUCKETS_S,
    ),
    Metric(
        "tiered_mount_answers_total",
        _C,
        "Answers, by the name of their code; `other`: no code of ours, passed on from a consumer.",
        ("code",),
    ),
    Metric("tiered_mount_sent_bytes_total", _C, "Bytes of answers."),
    Metric(
        "tiered_mount_pulls_total",
        _C,
        "Pulls by how the read ended. `TRY_AGAIN`: the tier did not answer; `OFFSET_FOUND_NULL`: it is damaged there.",
        ("status",),
    ),
    Metric(
        "tiered_mount_skipped_messages_total",
        _C,
        "Queue offsets passed over since they hold no message: recorded gaps and damaged records, not what was compacted.",
    ),
    Metric(
        "tiered_mount_read_bytes_total",
        _C,
        "Bytes of records given out, by where they were read: `tier`, or `local`, the broker's store beside a replica.",
        ("side",),
    ),
    Metric(
        "tiered_mount_replica_handed_back_total",
        _C,
        "Pulls at a replica that were sent to the master.",
    ),
    Metric(
        "tiered_mount_replica_passed_on_total",
        _C,
        "Requests that a replica had the master answer.",
    ),
    Metric(
        "tiered_mount_replica_master_known",
        _G,
        "1 while a name server knows the master of a replica.",
    ),
    Metric("tiered_mount_held_requests", _G, "Requests held at the end of a queue (long polling)."),
    Metric("tiered_mount_held_pops", _G, "Pops held until there is a message (long polling)."),
    Metric(
        "tiered_mount_popped_messages_in_flight",
        _G,
        "Messages that were popped and not acknowledged, as last counted.",
    ),
    Metric("tiered_mount_in_flight_bytes", _G, "Bytes of requests and answers under way."),
    Metric("tiered_mount_groups", _G, "Groups with consumers here."),
    Metric("tiered_mount_consumers", _G, "Consumers, one for each group that a client is in."),
    Metric("tiered_mount_topics", _G, "Topics that are served."),
    Metric(
        "tiered_mount_snapshots_total",
        _C,
        "Snapshots of consumers' offsets that are kept in the tier.",
    ),
    Metric(
        "tiered_mount_keeps_offsets",
        _G,
        "0 while the store takes no offsets of consumers or does not renew the mount's lease: offsets are in memory alone.",
    ),
    Metric(
        "tiered_mount_sent_back_total",
        _C,
        "Messages that consumers sent back and that are kept in the retry log.",
    ),
    Metric(
        "tiered_mount_given_again_total",
        _C,
        "Of these, put into retry topics when their time had come.",
    ),
    Metric(
        "tiered_mount_pending_retries",
        _G,
        "Messages of the retry log that wait for their time, or to be kept.",
    ),
    Metric(
        "tiered_mount_name_servers",
        _G,
        "1 while registered with a name server, 0 while it does not answer or refuses.",
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
    Metric("tiered_fleet_members", _G, "Members of the fleet that live, as this one sees it."),
    Metric("tiered_fleet_brokers", _G, "Brokers that are this member's to mount."),
    Metric(
        "tiered_fleet_failed_brokers",
        _G,
        "Those of them that could not be mounted, or ended by themselves; they are tried again. The log says why.",
    ),
    Metric(
        "tiered_fleet_living_brokers",
        _G,
        "Those of them that were not decommissioned, and are left alone.",
    ),
)

FLEET_METRICS: tuple[Metric, ...] = (
    *_OF_A_MEMBER,
    *(replace(metric, labels=(*metric.labels, BROKER)) for metric in MOUNT_METRICS),
)
"""Of a member of a fleet: those of a mount, each with its broker (`cluster/broker`), and some of its own."""


TIMER_METRICS: tuple[Metric, ...] = (
    Metric("tiered_timer_up", _G, "1 while timers are handed over, 0 while tier or target fail."),
    Metric(
        "tiered_timer_pending_messages",
        _G,
        "Items of hourly files that are not handed over, delete marks among them.",
    ),
    Metric("tiered_timer_pending_hours", _G, "Hours that have such."),
    Metric(
        "tiered_timer_next_due_seconds",
        _G,
        "Until the first hour that has such begins; below 0: it has begun. Alert when it is far below.",
    ),
    Metric(
        "tiered_timer_waiting_messages",
        _G,
        "Messages that the target's own wheel holds: they are handed over, and not due yet.",
    ),
    Metric(
        "tiered_timer_lateness_seconds",
        _G,
        "By how much the latest message was delivered late by the target's own wheel, since the start.",
    ),
    Metric("tiered_timer_handed_messages_total", _C, "Messages handed over."),
    Metric(
        "tiered_timer_found_messages_total",
        _C,
        "Messages of an interrupted batch that the target had already.",
    ),
    Metric("tiered_timer_refused_messages_total", _C, "Messages that the target refuses for good."),
    Metric(
        "tiered_timer_missing_messages_total",
        _C,
        "Messages that the file of their hour has lost, or the target's own store now that they are due.",
    ),
    Metric(
        "tiered_timer_held_messages",
        _G,
        "Messages that are held back, since their block is damaged. Above 0 a person should repair the timers' objects.",
    ),
    Metric(
        "tiered_timer_dropped_messages_total", _C, "Delete marks, and messages that were cancelled."
    ),
    Metric("tiered_timer_retries_total", _C, "Batches that had to be given again."),
    Metric(
        "tiered_timer_delivered_messages_total",
        _C,
        "Messages that the target's own wheel delivered.",
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
