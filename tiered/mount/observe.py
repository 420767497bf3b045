"""What a mount measures, as samples of ``tiered.metrics``; whether it is well, and whether clients may come.

From any thread: numbers are read while the loop changes them, each is right by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered.attach.observe import request_samples, resident_bytes
from tiered.metrics import Sample
from tiered.mount.codes import BY_CODE, Code

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiered.mount.mount import Mount


def collect(mount: Mount) -> list[Sample]:
    """All samples, as of now."""
    return [
        Sample("tiered_mount_up", is_well(mount) == ""),
        *_clients(mount),
        *_requests(mount),
        *_state(mount),
        *request_samples(mount.store.opened.meter),
        Sample("tiered_resident_bytes", resident_bytes()),
    ]


def is_well(mount: Mount) -> str:
    """What is wrong, in one clause; empty when nothing is."""
    trouble = mount.store.trouble
    return f"the tier cannot be looked at: {trouble}" if trouble else ""


def is_ready(mount: Mount) -> str:
    """Why clients should not come, in one clause; empty when they may."""
    if not mount.is_serving:
        return "it is not serving (yet, or any more)"
    servers = mount.names.servers if mount.names is not None else []
    if servers and all(server.error for server in servers):
        return f"registered with no name server: {servers[0].error}"
    return is_well(mount)


def _clients(mount: Mount) -> Iterator[Sample]:
    server, puller = mount.server, mount.puller
    if server is None or puller is None:
        return
    yield Sample("tiered_mount_connections", len(server.connections))
    yield Sample("tiered_mount_refused_connections_total", server.counters.refused_connections)
    for reason, count in sorted(server.counters.dropped.copy().items()):
        yield Sample("tiered_mount_dropped_connections_total", count, {"reason": reason})
    yield Sample("tiered_mount_in_flight_bytes", server.budget.used_bytes)
    yield Sample("tiered_mount_sent_bytes_total", server.counters.sent_bytes)
    yield Sample("tiered_mount_held_requests", puller.held)
    yield Sample("tiered_mount_skipped_messages_total", puller.skipped)
    for status, count in puller.found.copy().items():
        yield Sample("tiered_mount_pulls_total", count, {"status": status.name})


def _requests(mount: Mount) -> Iterator[Sample]:
    if mount.server is None:
        return
    counters = mount.server.counters
    names: dict[str, list[float]] = {}
    for code, count in sorted(counters.requests.copy().items()):
        known = BY_CODE.get(code)
        row = names.setdefault("other" if known is None else known.name, [0, 0.0])
        row[0] += count
        row[1] += counters.busy_s.get(code, 0.0)
    for name, (asked, busy_s) in names.items():
        yield Sample("tiered_mount_requests_total", asked, {"request": name})
        yield Sample("tiered_mount_request_seconds_total", busy_s, {"request": name})
    for code, count in sorted(counters.answers.copy().items()):
        yield Sample("tiered_mount_answers_total", count, {"code": Code(code).name})


def _state(mount: Mount) -> Iterator[Sample]:
    groups = list(mount.consumers.groups.values())
    yield Sample("tiered_mount_groups", len(groups))
    yield Sample("tiered_mount_consumers", sum(len(group.members) for group in groups))
    yield Sample("tiered_mount_topics", len(mount.topics.queues))
    if mount.keeper is not None:
        yield Sample("tiered_mount_snapshots_total", mount.keeper.saved)
    for server in mount.names.servers if mount.names is not None else []:
        yield Sample("tiered_mount_name_servers", not server.error, {"address": server.address})
