"""Options of the Spark sources, as Spark hands them over: texts by names in small letters. Pure, but ``open_place``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.s3_settings import S3Options
from tiered.api.broker_place import choose_place, find_places
from tiered.api.stores import backend_errors, open_for_reading
from tiered.archive.model import LOG
from tiered.clock import SystemClock
from tiered.errors import InvalidError
from tiered.log.reader import TierReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.log.parts import TierState


ARCHIVE = "archive"
TIER = "tier"
READ = frozenset(
    [
        "path",
        "source",
        "topic",
        "queue",
        "from",
        "until",
        "from-offset",
        "until-offset",
        "key",
        "uniq-key",
        "endpoint-url",
        "region",
        "profile",
        "path-style",
        "ca-bundle",
    ]
)
"""Options that every source takes."""
OF_TIER = frozenset(["cluster", "broker", "on-bad", "partition-bytes"])
OF_STREAM = frozenset(["start", "on-gap", "on-take-back", "max-messages", "max-bytes"])
_PARTITION_BYTES = 64 << 20


def source_options(options: S3Options) -> dict[str, str]:
    """How to reach S3, as options of a source; headers and keys of encryption are not among them."""
    style = options.path_style
    texts = {
        "endpoint-url": options.endpoint_url,
        "region": options.region,
        "profile": options.profile,
        "path-style": None if style is None else str(style).lower(),
        "ca-bundle": options.ca_bundle,
    }
    return {name: text for name, text in texts.items() if text is not None}


def s3_options(options: Mapping[str, str]) -> S3Options:
    """Undo ``source_options``."""
    style = options.get("path-style")
    return S3Options(
        endpoint_url=options.get("endpoint-url"),
        region=options.get("region"),
        profile=options.get("profile"),
        path_style=None if style is None else style == "true",
        ca_bundle=options.get("ca-bundle"),
    )


def open_place(options: Mapping[str, str]) -> ObjectStore:
    """The store that ``load`` names, with retries.

    Raises:
        InvalidError: No URL is given, or it is wrong.
    """
    if not options.get("path"):
        raise InvalidError("no URL is given", do='say .load("s3://bucket/prefix")')
    return open_for_reading(options["path"], s3_options(options), SystemClock()).store


def kind_of(options: Mapping[str, str], kind: str | None) -> str:
    """Whether it is an archive or a tier.

    Args:
        options: Of the source; without ``source`` the place is looked at: an archive has a log.
        kind: What the source's name says already.

    Raises:
        InvalidError: ``source`` says neither, or something else than the name.
    """
    said = options.get("source", kind or "auto")
    if said not in {ARCHIVE, TIER, "auto"} or kind not in {None, said}:
        raise InvalidError(f"the option source is {said!r:.40}", do="say archive or tier")
    if said != "auto":
        return said
    with backend_errors():
        store = open_place(options)
        try:
            return ARCHIVE if next(iter(store.list(LOG)), None) is not None else TIER
        finally:
            store.close()


def require_known(options: Mapping[str, str], known: frozenset[str]) -> None:
    """Refuse options that nobody would look at.

    Raises:
        InvalidError: There is one.
    """
    unknown = sorted(name.lower() for name in options if name.lower() not in known)
    if unknown:
        raise InvalidError(
            f"there is no option {unknown[0]} here", do=f"options are {' '.join(sorted(known))}"
        )


def choice(options: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    """An option with a few values, the first being the default.

    Raises:
        InvalidError: It has another.
    """
    said = options.get(name, values[0])
    if said not in values:
        raise InvalidError(f"the option {name} is {said!r:.40}", do=f"say {' or '.join(values)}")
    return said


def whole(options: Mapping[str, str], name: str, default: int | None) -> int | None:
    """An option that is a number above 0.

    Raises:
        InvalidError: It is not.
    """
    said = options.get(name)
    if said is None:
        return default
    if not said.isascii() or not said.isdigit() or not int(said):
        raise InvalidError(f"the option {name} is no number above 0: {said!r:.40}")
    return int(said)


def partition_bytes(options: Mapping[str, str]) -> int:
    """How many bytes of a tier one task reads, about."""
    return whole(options, "partition-bytes", None) or _PARTITION_BYTES


# -- states of brokers -----------------------------------------------------------------------------
#
# The states of all brokers of a tier, or of the one that options name, followed from one read to the next. One
# thread.


class TierStates:
    """Follows the journals."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Open the store; nothing is read yet.

        Args:
            options: Of a source.

        Raises:
            InvalidError: The URL or an option is wrong.
        """
        self._options = options
        self._store = open_place(options)
        self._readers: dict[Place, TierReader] = {}

    def read(self) -> dict[Place, TierState]:
        """As they are now.

        Raises:
            InvalidError: There is no such tier.
            DataError: A journal is damaged.
            BackendError: The store failed.
        """
        for place in self._places():
            if place not in self._readers:
                self._readers[place] = TierReader(self._store, place.prefix)
            self._readers[place].refresh()
        return {place: reader.state for place, reader in self._readers.items()}

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _places(self) -> list[Place]:
        cluster, broker = self._options.get("cluster"), self._options.get("broker")
        if cluster is not None and broker is not None:
            return list(self._readers) or [choose_place(self._store, cluster, broker)]
        found = [
            place
            for place in find_places(self._store)
            if cluster in {None, place.cluster} and broker in {None, place.broker}
        ]
        return found or [choose_place(self._store, cluster, broker)]
