"""Options of ``tiered mount``."""

from __future__ import annotations

from functools import partial

from tiered.cli.values import above_zero, address, addresses, not_below_zero, parse_size, whole
from tiered.config import Setting, Shape

_flag = partial(Setting, section="mount", shape=Shape.FLAG, default=False, metavar="")
_seconds = partial(Setting, section="mount", metavar="SECONDS", parse=above_zero)
_positive = partial(Setting, section="mount", metavar="N", parse=partial(whole, low=1))
_size = partial(Setting, section="mount", metavar="SIZE", parse=parse_size)
_MIB = 1024 * 1024

MOUNT: tuple[Setting, ...] = (
    Setting(
        section="mount",
        name="listen",
        help="address to serve clients at; :PORT is every address of this machine, and a port of 0 any free one",
        default="127.0.0.1:10911",
        metavar="HOST:PORT",
        parse=address,
    ),
    Setting(
        section="mount",
        name="advertise",
        help="address at which clients reach this mount, as name servers are told",
        default_text="that of --listen, else this machine's as name servers see it",
        metavar="HOST:PORT",
        parse=address,
    ),
    Setting(
        section="mount",
        name="namesrv",
        help="name servers to register with",
        default_text="none: clients may take the mount itself for their name server",
        metavar="HOST:PORT;...",
        parse=addresses,
    ),
    Setting(
        section="mount",
        name="name",
        help="broker's name under which the tier is served",
        default_text="the old broker's",
        metavar="NAME",
    ),
    Setting(
        section="mount",
        name="consumer-offsets",
        help=(
            "a broker's config/consumerOffset.json: where groups go on that have no offsets in the"
            " mount's own place yet"
        ),
        default_text="none",
        metavar="FILE",
    ),
    _flag(
        name="no-state",
        help="keep offsets of consumers in memory alone, and write nothing to the tier",
    ),
    _seconds(
        name="snapshot-seconds",
        help="how often changed offsets of consumers are kept in the tier, seconds; a crash loses so much at most",
        default=5.0,
    ),
    _seconds(
        name="refresh",
        help="how often the tier is looked at for what is new, seconds; one listing each",
        default=5.0,
    ),
    _seconds(name="lease-seconds", help="how long the mount's lease lasts, seconds", default=10.0),
    _flag(
        name="no-wait",
        help="end with code 4 when another mount of this name holds the lease, instead of waiting",
    ),
    Setting(
        section="mount",
        name="drain-seconds",
        help="when told to stop: how long to finish what is under way, seconds",
        default=10.0,
        metavar="SECONDS",
        parse=not_below_zero,
    ),
    _size(
        name="memory", help="bytes for reading the tier: cache and read-ahead", default=256 * _MIB
    ),
    _positive(name="readers", help="threads that read the tier", default=16),
    _positive(name="connections", help="connections of clients at once, at most", default=4096),
    _positive(
        name="held-requests",
        help="requests held at the end of a queue at once, at most (long polling)",
        default=20_000,
    ),
    _size(
        name="in-flight-size",
        help="bytes of requests being received and answers being sent, at most",
        default=256 * _MIB,
    ),
    Setting(
        section="mount",
        name="tls-cert",
        help="PEM file with the certificate to serve clients with, over TLS alone",
        default_text="no TLS",
        metavar="FILE",
    ),
    Setting(
        section="mount",
        name="tls-key",
        help="PEM file with its key, without a passphrase",
        default_text="in the file of --tls-cert",
        metavar="FILE",
    ),
    Setting(
        section="mount",
        name="metrics-listen",
        help="serve Prometheus metrics (/metrics), /healthz and /readyz at this address",
        default_text="not served",
        metavar="HOST:PORT",
        parse=address,
    ),
)
