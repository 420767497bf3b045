"""What commands have in common that serve until they are told to stop: waiting for a lease, metrics, and how they end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from tiered.errors import TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiered.cli.call import Call
    from tiered.cli.signals import Stopper
    from tiered.cli.values import Address
    from tiered.journal.lease import LeaseState

T = TypeVar("T")


def open_unless_stopped(stopper: Stopper, open_it: Callable[[], T]) -> T | None:
    """What opens; None when that ended because of a signal, and so with nothing in hand.

    Raises:
        TieredStoreError: It failed by itself.
    """
    try:
        return open_it()
    except TieredStoreError:
        if stopper.received is None:
            raise
        return None


def announce_lease(call: Call, what: str, lease: LeaseState) -> None:
    """Say whom we wait for; ``what`` is what the holder has."""
    left_s = max(0.0, (lease.expires_ms - call.clock.now_ms()) / 1000)
    call.say(
        f"tiered: waiting for the {what} of process {lease.holder.pid} on {lease.holder.host}"
        f" (the lease lasts {left_s:.0f} s more unless it is renewed; --no-wait ends at once)"
    )


@contextlib.contextmanager
def metrics_served(
    call: Call,
    address: Address,
    *,
    metrics: Callable[[], str],
    health: Callable[[], str],
    readiness: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Serve metrics and health at an address while the block runs.

    Args:
        call: Is told where.
        address: Of ``--metrics-listen``.
        metrics: Text of ``/metrics``.
        health: What is wrong, for ``/healthz``.
        readiness: Why nobody should come, for ``/readyz``; None: it is not served.
    """
    from tiered.attach.metrics_server import MetricsServer

    server = MetricsServer(*address, metrics=metrics, health=health, readiness=readiness)
    call.say(f"tiered: metrics at http://{address.host or '0.0.0.0'}:{server.port}/metrics")  # noqa: S104 (said, not bound)
    try:
        yield
    finally:
        server.close()
