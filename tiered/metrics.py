"""The metrics that are served to Prometheus: their table, and the text form. docs/metrics.md is made of the table."""

from __future__ import annotations

import enum
from dataclasses import field, replace
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricType(enum.Enum):
    """What the number does."""

    GAUGE = "gauge"
    """Goes up and down."""
    COUNTER = "counter"
    """Only grows, from 0 at the start of the process."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str  # with the unit last (``_total`` after it for counters)
    kind: MetricType  # gauge or counter
    help: str  # what it says, and what to do about it where that is not plain
    labels: tuple[str, ...] = ()  # names of its labels


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric at one moment."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


_G, _C = MetricType.GAUGE, MetricType.COUNTER

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
        "Requests that failed, by class of the error.",
        ("kind", "error"),
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
    Metric("tiered_resident_bytes", _G, "Memory of the whole process."),
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
        "tiered_mount_request_seconds_total",
        _C,
        "From a request to its answer; the time that a request is held counts.",
        ("request",),
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
            "tiered_transfer_bytes_total",
            "tiered_request_dollars_total",
            "tiered_request_retries_total",
            "tiered_resident_bytes",
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
    *(
        metric
        if metric.name == "tiered_resident_bytes"
        else replace(metric, labels=(*metric.labels, BROKER))
        for metric in MOUNT_METRICS
    ),
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


def render(samples: Iterable[Sample], metrics: Iterable[Metric] = METRICS) -> str:
    """The text that Prometheus reads. Metrics come in the table's order; those without a sample are left out.

    Raises:
        KeyError: A sample of a metric that is not in the table, or without one of its labels.
    """
    table = {metric.name: metric for metric in metrics}
    rows: dict[str, list[str]] = {name: [] for name in table}
    for sample in samples:
        metric = table[sample.name]
        pairs = ",".join(f'{name}="{_escaped(sample.labels[name])}"' for name in metric.labels)
        label = f"{{{pairs}}}" if pairs else ""
        rows[sample.name].append(f"{sample.name}{label} {_number(sample.value)}")
    lines: list[str] = []
    for name, found in rows.items():
        if found:
            lines += [
                f"# HELP {name} {table[name].help}",
                f"# TYPE {name} {table[name].kind.value}",
            ]
            lines += found
    return "\n".join([*lines, ""])


def _escaped(value: str) -> str:
    """A label's value; bytes that are no UTF-8 become U+FFFD."""
    text = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
