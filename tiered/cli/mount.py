"""``tiered mount``: serves a tier read-only over the broker's protocol."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from backends.lazy_dataclass import dataclass, picked
from tiered.addresses import Address, Addresses, addresses
from tiered.cli import kinds
from tiered.cli.exits import DONE, NEEDS_A_PERSON
from tiered.cli.frame import command
from tiered.cli.options import argument, flag, option, several, taken
from tiered.cli.output import show
from tiered.cli.serve import ServingOptions, announce_lease, metrics_served, open_unless_stopped
from tiered.cli.signals import Stopper
from tiered.cli.values import counted, topic_filter, unmatched
from tiered.errors import InvalidError
from tiered.metrics import BROKER, FLEET_METRICS, MOUNT_METRICS

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from tiered.cli.call import Call
    from tiered.cli.serve import Shown
    from tiered.mount.acl import SigningKey
    from tiered.mount.mount import Mount, MountSettings
    from tiered.mount.offsets import Name

_MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class MountOptions(ServingOptions):
    """What ``tiered mount`` can be told."""

    url: str = argument()
    listen: Address = option(
        "address for clients; :PORT: all interfaces; port 0: any free one",
        kinds.ADDRESS,
        default=Address("127.0.0.1", 10911),
    )
    no_vip_channel: bool = flag("no VIP channel (two ports below --listen)")
    advertise: Address | None = option(
        "address to register, where clients reach this mount",
        kinds.ADDRESS,
        default_text="that of --listen, or this machine's",
    )
    topics: tuple[str, ...] = several(
        "topics to announce; others are served when asked for",
        kinds.GLOBS,
        default_text="all",
    )
    share_topics: bool = flag(
        "also announce topics that a live broker has; consumers then read both"
    )
    namesrv: Addresses | None = option(
        "name servers to register with",
        kinds.Kind("HOST:PORT;...", addresses),
        default_text="none: the mount is one",
    )
    name: str | None = option(
        "broker name to serve under", kinds.NAME, default_text="the old broker's"
    )
    shared: bool = flag(
        "one of several mounts of this tier, each with its own name servers and consumer offsets"
    )
    auto: bool = flag(
        "mount all decommissioned brokers, shared among the processes that run this; ports from --listen on",
        excludes="name consumer-offsets no-state shared cluster broker",
    )
    replica_of_live: bool = flag(
        "be a read-only replica of the living broker, which sends lagging consumers here (slaveReadEnable=true)",
        needs="namesrv",
        excludes="name shared auto share-topics topics",
    )
    broker_id: int = option(
        "the replica's id, the group's whichBrokerWhenConsumeSlowly",
        kinds.COUNT,
        default=1,
        needs="replica-of-live",
    )
    master_credentials: str | None = option(
        "file like conf/tools.yml with the replica's accessKey and secretKey, for a master with access control",
        kinds.FILE,
        needs="replica-of-live",
    )
    take_over: bool = flag(
        "serve in place of a broker that is gone for good, unless a name server knows it",
        needs="replica-of-live",
    )
    store: str | None = option(
        "the living broker's store directory, read only",
        kinds.DIR,
        needs="replica-of-live",
        excludes="take-over",
    )
    read_policy: str = option(
        "with --store: read from the tier everything, what is not in the page cache, or what the broker has deleted",
        kinds.one_of("POLICY", "FORCE", "NOT_IN_MEM", "NOT_IN_DISK"),
        default="FORCE",
        needs="store",
    )
    consumer_offsets: str | None = option(
        "a broker's config/consumerOffset.json, for groups unknown to the mount",
        kinds.FILE,
    )
    no_state: bool = flag("write nothing: consumer offsets stay in memory")
    snapshot_s: float = option(
        "how often to save consumer offsets",
        kinds.DURATION_S,
        name="snapshot-seconds",
        default=5.0,
    )
    ack_s: float = option(
        "how long to collect acknowledgements of pops into one write",
        kinds.DURATION_S,
        name="ack-seconds",
        default=0.25,
    )
    retry_ttl_ms: int = option(
        "how long to keep dead letters, and retries once delivered",
        kinds.DURATION_MS,
        name="retry-ttl",
        default=7 * 86_400_000,
    )
    refresh_s: float = option(
        "how often to look for new messages; a listing each",
        kinds.DURATION_S,
        default=5.0,
    )
    memory_bytes: int = option(
        "memory for reading: cache and read-ahead", kinds.SIZE, default=256 * _MIB
    )
    readers: int = option("threads that read the tier", kinds.COUNT, default=16)
    connections: int = option("maximum client connections", kinds.COUNT, default=4096)
    held_requests: int = option(
        "maximum requests held by long polling",
        kinds.COUNT,
        default=20_000,
    )
    in_flight_size_bytes: int = option(
        "memory for requests and answers in progress",
        kinds.SIZE,
        default=256 * _MIB,
    )
    acl: str | None = option(
        "access rules (plain_acl.yml, conf/acl, 5.x users and rules), or secrets for those the broker left; reloaded"
        " on change",
        kinds.FILE,
        default_text="anybody may read",
    )
    no_acl: bool = flag("serve anybody although the tier has access rules", excludes="acl")
    tls_cert: str | None = option(
        "PEM file with the server certificate; requires TLS",
        kinds.FILE,
    )
    tls_key: str | None = option(
        "PEM file with its unencrypted key",
        kinds.FILE,
        default_text="in the file of --tls-cert",
        needs="tls-cert",
    )


@command("mount", MountOptions)
def run(call: Call, options: MountOptions) -> int:
    """Serves a tier read-only to RocketMQ's clients.

    Consumers of a broker that is gone continue here, with their offsets; see docs/mount.md. For replicas of a living
    broker see docs/cold-reads.md.

    Examples:
        tiered mount s3://bucket/prefix --listen :10911 --namesrv 10.0.0.5:9876
        tiered mount file:///tmp/tier --listen 127.0.0.1:10911
    """
    from tiered.mount.mount import Mount

    settings = read_settings(call, options)
    if options.auto:
        return run_fleet(call, options, settings)
    stopping = threading.Event()
    mounts: list[Mount] = []

    def stop() -> None:
        stopping.set()
        for mount in mounts:
            mount.stop()

    began_s = call.clock.monotonic_s()
    stopper = Stopper(call.watch, stop, seconds=settings.drain_s)
    with (
        stopper,
        metrics_served(call, options.metrics_listen, MOUNT_METRICS, "tiered_mount_up") as shown,
    ):
        mount = open_unless_stopped(
            stopper,
            lambda: Mount.open(
                options.url,
                settings,
                options=call.s3_options(),
                clock=call.clock,
                announce=partial(announce_lease, call, "mount", shown),
                stopping=stopping,
            ),
        )
        if mount is None:
            return DONE
        mounts.append(mount)
        try:
            if shown is not None:
                shown.watch(mount)
                time_answers(shown, mount)
            mount.run(lambda ready: tell(call, options, ready))
            document = summary(mount, call.clock.monotonic_s() - began_s)
        finally:
            mount.close()
    show(call, document, lines=())
    answered, groups = counted(document["requests"], "request"), document["groups"]
    call.say(f"tiered: {answered} answered; {counted(groups, 'group')} of consumers known")
    if not mount.is_drained:
        return stopper.exit_code or NEEDS_A_PERSON
    return DONE


def run_fleet(call: Call, options: MountOptions, settings: MountSettings) -> int:
    """Be a member of a fleet, until we are stopped."""
    from tiered.mount.fleet import Fleet

    began_s = call.clock.monotonic_s()
    fleet = Fleet(
        options.url,
        settings,
        options=call.s3_options(),
        clock=call.clock,
        rng=random.SystemRandom(),
        tell=lambda text: call.say(f"tiered: {text}"),
    )
    with (
        Stopper(call.watch, fleet.stop, seconds=settings.drain_s) as stopper,
        metrics_served(
            call, options.metrics_listen, FLEET_METRICS, "tiered_fleet_members"
        ) as shown,
    ):
        if shown is not None:
            shown.watch(fleet)
            fleet.on_mount = lambda place, mount: time_answers(
                shown, mount, **{BROKER: f"{place.cluster}/{place.broker}"}
            )
        fleet.run()
    seconds = call.clock.monotonic_s() - began_s
    mounts = [summary(mount, seconds) for mount in fleet.ended if mount.server is not None]
    document = {"format": 1, "member": fleet.member, "mounts": mounts}
    show(call, document, rows=mounts, columns=list(mounts[0]) if mounts else [], lines=())
    return DONE if fleet.is_drained else stopper.exit_code or NEEDS_A_PERSON


def time_answers(shown: Shown, mount: Mount, **labels: str) -> None:
    """Measure how long clients wait for a mount, and the mount for its tier."""
    observe = shown.exposition.observe
    shown.time_requests(mount.store.opened.meter, **labels)
    mount.on_answered = lambda request, taken_s: observe(
        "tiered_mount_request_seconds", taken_s, request=request, **labels
    )


def read_settings(call: Call, options: MountOptions) -> MountSettings:
    """What the options say."""
    from pathlib import Path

    from fetcher.statuses import Policy
    from tiered.mount.mount import MountSettings
    from tiered.mount.pulling import PullLimits
    from tiered.mount.retries import RetryLimits
    from tiered.mount.server import ServerLimits

    is_replica = options.replica_of_live and not options.take_over
    return taken(
        MountSettings,
        options,
        replica_id=options.broker_id if is_replica else 0,
        is_taking_over=options.take_over,
        master_key=master_key(options) if is_replica else None,
        store_dir=options.store,
        policy=Policy[options.read_policy],
        has_vip=not options.no_vip_channel,
        namesrv=options.namesrv or (),
        cluster=call.common.cluster,
        broker=call.common.broker,
        selects=topic_filter(options.topics),
        shares_topics=options.share_topics,
        is_shared=options.shared,
        keeps_offsets=not (options.no_state or is_replica),
        known_offsets=known_offsets(options),
        wait=not options.no_wait,
        tls=tls_context(options),
        acl=Path(options.acl) if options.acl is not None else None,
        is_open=options.no_acl,
        server=ServerLimits(
            connections_max=options.connections, bytes_max=options.in_flight_size_bytes
        ),
        pulls=PullLimits(held_max=options.held_requests),
        retries=RetryLimits(kept_ms=options.retry_ttl_ms),
    )


def master_key(options: MountOptions) -> SigningKey | None:
    """With which a replica signs."""
    if options.master_credentials is None:
        return None
    from pathlib import Path

    from tiered.mount.acl_files import read_signing_key

    return read_signing_key(Path(options.master_credentials))


def known_offsets(options: MountOptions) -> Mapping[Name, Mapping[int, int]]:
    """Of the file that a broker left."""
    path = options.consumer_offsets
    if path is None:
        return {}
    from pathlib import Path

    from tiered.format.fastjson import loads
    from tiered.local.layout import parse_offsets

    try:
        return parse_offsets(loads(Path(path).read_bytes()))
    except OSError as error:
        raise InvalidError(
            f"it cannot be read: {error.strerror}", where=path, do="check --consumer-offsets"
        ) from error
    except ValueError as error:
        raise InvalidError(
            f"no consumer offsets of a broker: {error}",
            where=path,
            do="name a broker's config/consumerOffset.json, or its .bak",
        ) from error


def tls_context(options: MountOptions) -> ssl.SSLContext | None:
    """For connections of clients."""
    certificate, key = options.tls_cert, options.tls_key
    if certificate is None:
        return None
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise InvalidError(
            f"TLS cannot be served with this: {error}",
            where=certificate,
            do="give a PEM file with the certificate and one with its key, without a passphrase",
        ) from error
    return context


def tell(call: Call, options: MountOptions, mount: Mount) -> None:
    """Say what is served. Name servers that were told of it stand in the log by themselves."""
    place = mount.store.opened.place
    queues = list(mount.store.tiered_queues())
    topics = {queue.topic for queue in queues}
    call.say(
        f"tiered: serving {mount.store.opened.meter.url} as {place.cluster}/{mount.name} at {mount.address}:"
        f" {counted(len(topics), 'topic')}, {counted(len(queues), 'queue')}, read-only"
    )
    if mount.master is not None:
        call.say(
            f"tiered: replica {options.broker_id} of the living broker at {mount.master.address}"
        )
    for glob in unmatched(options.topics, topics):
        call.say(f"tiered: no topic matches --topics {glob} yet")
    if mount.handover is not None:
        call.say(
            "tiered: the broker was decommissioned:"
            f" groups continue in {counted(mount.inherited, 'queue')} at its offsets"
            if mount.inherited
            else "tiered: the broker was decommissioned: groups continue at the offsets of this mount"
        )
    if mount.guard is not None:
        keys = counted(len(mount.guard.keys), "access key")
        call.say(f"tiered: requests must be signed: {keys} in {options.acl}")
    elif options.no_acl:
        call.say("tiered: serving anybody (--no-acl)")
    if mount.adopted:
        call.say(
            f"tiered: groups continue in {counted(mount.adopted, 'queue')} by --consumer-offsets"
        )


def summary(mount: Mount, seconds: float) -> dict[str, Any]:
    """The document of ``tiered mount --json``."""
    assert mount.server is not None
    assert mount.puller is not None
    counters, requests = mount.server.counters, mount.store.opened.meter.snapshot()
    return {
        "format": 1,
        "url": mount.store.opened.meter.url,
        **picked(mount.store.opened.place, "cluster", "broker"),
        "name": mount.name,
        "address": mount.address,
        "is_drained": mount.is_drained,
        "seconds": round(seconds, 3),
        "requests": sum(counters.requests.values()),
        "sent_bytes": counters.sent_bytes,
        "skipped_messages": mount.puller.skipped,
        "left_out_topics": sorted(mount.topics.left_out),
        "groups": mount.offsets.group_count,
        "snapshots": mount.keeper.saved if mount.keeper is not None else 0,
        "store_requests": requests.requests,
        "store_request_dollars": round(requests.dollars, 6),
    }
