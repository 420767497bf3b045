"""``tiered mount``: serves a tier read-only over the broker's protocol."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import click

from tiered.cli.errors import DONE, NEEDS_A_PERSON
from tiered.cli.frame import COMMANDS, make_command
from tiered.cli.output import Output
from tiered.cli.signals import Stopper
from tiered.cli.values import counted, split_address, split_addresses
from tiered.errors import InvalidError, TieredStoreError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Mapping

    from tiered.cli.call import Call
    from tiered.journal.lease import LeaseState
    from tiered.mount.mount import Mount, MountSettings
    from tiered.mount.offsets import Name


def run(call: Call) -> int:
    """Mount, and stay until we are stopped."""
    from tiered.mount.mount import Mount

    settings = read_settings(call)
    output = Output(call)
    stopping = threading.Event()
    mounts: list[Mount] = []

    def stop() -> None:
        stopping.set()
        for mount in mounts:
            mount.stop()

    began_s = call.clock.monotonic_s()
    stopper = Stopper(call.watch, stop, seconds=settings.drain_s)
    with stopper:
        try:
            mount = Mount.open(
                call.argument("url"),
                settings,
                options=call.s3_options(),
                clock=call.clock,
                announce=lambda lease: announce(call, lease),
                stopping=stopping,
            )
        except TieredStoreError:
            if stopper.received is None:
                raise
            return DONE  # nothing was in hand
        mounts.append(mount)
        try:
            with metrics_served(call, mount):
                mount.run(lambda ready: tell(call, ready))
            document = summary(mount, call.clock.monotonic_s() - began_s)
        finally:
            mount.close()
    if output.form != "table":
        output.emit(document, [document], list(document))
    answered, groups = counted(document["requests"], "request"), document["groups"]
    call.say(f"tiered: {answered} answered; {counted(groups, 'group')} of consumers known")
    if not mount.is_drained:
        return stopper.exit_code or NEEDS_A_PERSON
    return DONE


def read_settings(call: Call) -> MountSettings:
    """What the options say.

    Raises:
        InvalidError: A file that is none.
    """
    from tiered.mount.mount import MountSettings
    from tiered.mount.pulling import PullLimits
    from tiered.mount.server import ServerLimits

    advertise, names = call.text("advertise"), call.text("namesrv")
    return MountSettings(
        listen=split_address(call.words("listen")),
        advertise=split_address(advertise) if advertise else None,
        namesrv=split_addresses(names) if names else (),
        cluster=call.text("cluster"),
        broker=call.text("broker"),
        name=call.text("name"),
        keeps_offsets=not call.flag("no-state"),
        known_offsets=known_offsets(call),
        snapshot_s=call.number("snapshot-seconds"),
        refresh_s=call.number("refresh"),
        lease_s=call.number("lease-seconds"),
        wait=not call.flag("no-wait"),
        drain_s=call.number("drain-seconds"),
        memory_bytes=call.whole("memory"),
        readers=call.whole("readers"),
        tls=tls_context(call),
        server=ServerLimits(
            connections_max=call.whole("connections"), bytes_max=call.whole("in-flight-size")
        ),
        pulls=PullLimits(held_max=call.whole("held-requests")),
    )


def known_offsets(call: Call) -> Mapping[Name, Mapping[int, int]]:
    """Of the file that a broker left.

    Raises:
        InvalidError: There is no such file, or it is none.
    """
    path = call.text("consumer-offsets")
    if path is None:
        return {}
    from pathlib import Path

    from tiered.format.fastjson import loads
    from tiered.local.configs import parse_offsets

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


def tls_context(call: Call) -> ssl.SSLContext | None:
    """For connections of clients.

    Raises:
        InvalidError: The certificate or its key cannot be used.
    """
    certificate, key = call.text("tls-cert"), call.text("tls-key")
    if certificate is None:
        if key is not None:
            raise InvalidError("--tls-key goes with --tls-cert", do="give both")
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


@contextlib.contextmanager
def metrics_served(call: Call, mount: Mount) -> Iterator[None]:
    """Serve metrics at ``--metrics-listen``, if it is given."""
    address = call.text("metrics-listen")
    if address is None:
        yield
        return
    from tiered.attach.metrics_server import MetricsServer
    from tiered.metrics import MOUNT_METRICS, render
    from tiered.mount.observe import collect, is_ready, is_well

    host, port = split_address(address)
    server = MetricsServer(
        host,
        port,
        metrics=lambda: render(collect(mount), MOUNT_METRICS),
        health=lambda: is_well(mount),
        readiness=lambda: is_ready(mount),
    )
    call.say(f"tiered: metrics at http://{host or '0.0.0.0'}:{server.port}/metrics")  # noqa: S104 (said, not bound)
    try:
        yield
    finally:
        server.close()


def announce(call: Call, lease: LeaseState) -> None:
    """Say whom we wait for."""
    left_s = max(0.0, (lease.expires_ms - call.clock.now_ms()) / 1000)
    call.say(
        f"tiered: waiting for the mount of process {lease.holder.pid} on {lease.holder.host}"
        f" (its lease lasts {left_s:.0f} s more unless it is renewed; --no-wait ends at once)"
    )


def tell(call: Call, mount: Mount) -> None:
    """Say what is served."""
    place = mount.store.opened.place
    queues = list(mount.store.tiered_queues())
    topics = len({queue.topic for queue in queues})
    call.say(
        f"tiered: serving {mount.store.opened.meter.url} as {place.cluster}/{mount.name} at {mount.address}:"
        f" {counted(topics, 'topic')}, {counted(len(queues), 'queue')}, read-only"
    )
    if mount.handover is not None:
        call.say(
            "tiered: the broker was decommissioned:"
            f" groups go on in {counted(mount.inherited, 'queue')} where they were with it"
            if mount.inherited
            else "tiered: the broker was decommissioned: groups go on where they were here"
        )
    if mount.adopted:
        call.say(f"tiered: groups go on in {counted(mount.adopted, 'queue')} by --consumer-offsets")
    for server in mount.names.servers if mount.names is not None else []:
        call.say(
            f"tiered: name server {server.address}: {server.error or 'registered'}",
            level="warning" if server.error else "info",
        )


def summary(mount: Mount, seconds: float) -> dict[str, Any]:
    """The document of ``tiered mount --json``."""
    assert mount.server is not None
    assert mount.puller is not None
    counters, requests = mount.server.counters, mount.store.opened.meter.snapshot()
    return {
        "format": 1,
        "url": mount.store.opened.meter.url,
        "cluster": mount.store.opened.place.cluster,
        "broker": mount.store.opened.place.broker,
        "name": mount.name,
        "address": mount.address,
        "is_drained": mount.is_drained,
        "seconds": round(seconds, 3),
        "requests": sum(counters.requests.values()),
        "sent_bytes": counters.sent_bytes,
        "skipped_messages": mount.puller.skipped,
        "groups": mount.offsets.group_count,
        "snapshots": mount.keeper.saved if mount.keeper is not None else 0,
        "store_requests": requests.requests,
        "store_request_dollars": round(requests.dollars, 6),
    }


COMMAND = make_command(
    "mount",
    run,
    summary=COMMANDS["mount"].summary,
    arguments=[click.Argument(["url"])],
    examples=[
        "tiered mount s3://bucket/prefix --listen :10911 --namesrv 10.0.0.5:9876",
        "tiered mount file:///tmp/tier --listen 127.0.0.1:10911",
    ],
    details=(
        "A broker is gone, and its tier is there: consumers go on reading from the mount as if it were the broker, with"
        " the offsets that they commit to it. Producers are sent to other brokers. docs/mount.md has what works."
    ),
)
