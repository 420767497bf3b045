"""Options of the Spark sources, as Spark hands them over: texts by names in small letters; and the states that they name."""

from __future__ import annotations

import base64
import contextlib
import zlib
from typing import TYPE_CHECKING

from backends.s3_settings import S3Options
from tiered.api.broker_place import choose_place, find_places
from tiered.api.stores import backend_errors, open_for_reading
from tiered.archive.bodies import ERROR, PREFIX, RECORD, TEXT
from tiered.archive.columns import schema as archive_schema
from tiered.archive.machine import ArchiveMachine
from tiered.archive.model import LOG, ArchiveQueue
from tiered.archive.tables import read_archive
from tiered.clock import SystemClock
from tiered.errors import InvalidError, nearest
from tiered.journal.replay import JournalReader
from tiered.log.lineage import Isolation
from tiered.log.reader import TierReader
from tiered.spark.offset_ranges import FAIL, SKIP, is_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from backends.base import ObjectStore
    from tiered.api.broker_place import Place
    from tiered.archive.machine import ArchiveState
    from tiered.archive.selection import Selection
    from tiered.log.parts import TierState
    from tiered.spark.offset_ranges import Key


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
        "isolation",
        "endpoint-url",
        "region",
        "profile",
        "path-style",
        "ca-bundle",
    ]
)
"""Options that every source takes."""
OF_TIER = frozenset(["cluster", "broker", "on-bad", "partition-bytes", "archive", "pinned"])
"""Options of a tier. ``pinned`` is ``tiered.spark.offset_ranges.pins_of`` in compressed form, said by programs alone."""
OF_STREAM = frozenset(
    ["start", "on-gap", "on-truncation", "on-missing-topic", "max-messages", "max-bytes"]
)
DDL = (
    "topic string, queue_id int, queue_offset long, uniq_key string, msg_key string, keys array<string>, tag string,"
    " born_ts timestamp, store_ts timestamp, born_host string, store_host string, sys_flag int, flag int,"
    " body_crc long, reconsume_times int, prepared_tx_offset long, properties map<string,string>, body binary,"
    " physical_offset long, broker string, incarnation int"
)
"""The columns of docs/formats/archive.md in Spark's words."""
SOME = (ERROR, TEXT, RECORD)
"""Columns that only some files have, whatever is in bodies."""
_PARTITION_BYTES = 64 << 20
_KNOWN_AS = {
    "maxoffsetspertrigger": "max-messages",
    "maxbytespertrigger": "max-bytes",
    "startingoffsets": "start",
    "failondataloss": "on-gap",
}
"""Names of other sources of Spark, in small letters, for the same thing."""
_ON_LOSS = {"true": "fail", "false": "skip"}


def plain_names(options: Mapping[str, str]) -> dict[str, str]:
    """Options by our names, whichever were given.

    Raises:
        InvalidError: One thing is said under two names, or ``failOnDataLoss`` is neither true nor false.
    """
    found = {name.lower(): text for name, text in options.items()}
    for other, ours in _KNOWN_AS.items():
        if other not in found:
            continue
        if ours in found:
            raise InvalidError(
                f"the options {other} and {ours} are given both", do="give one of them"
            )
        said = found.pop(other)
        if ours == "on-gap":
            if said.lower() not in _ON_LOSS:
                raise InvalidError(f"the option {other} is {said!r:.40}", do="say true or false")
            said = _ON_LOSS[said.lower()]
        found[ours] = said
    return found


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
    style = options.get("path-style", "true").lower()
    if style not in {"true", "false"}:  # taken for false it would send requests to other hosts
        raise InvalidError(f"the option path-style is {style!r:.40}", do="say true or false")
    return S3Options(
        endpoint_url=options.get("endpoint-url"),
        region=options.get("region"),
        profile=options.get("profile"),
        path_style=style == "true" if "path-style" in options else None,
        ca_bundle=options.get("ca-bundle"),
    )


@contextlib.contextmanager
def at_place(options: Mapping[str, str]) -> Iterator[ObjectStore]:
    """The store that ``load`` names, with retries, open within the context; its failures are said as ours."""
    with backend_errors(), contextlib.closing(open_place(options)) as store:
        yield store


def at_archive(options: Mapping[str, str]) -> contextlib.AbstractContextManager[ObjectStore]:
    """The same of the archive beside a tier."""
    return at_place(_beside(options))


def _beside(options: Mapping[str, str]) -> dict[str, str]:
    return {**options, "path": options["archive"]}


def open_place(options: Mapping[str, str]) -> ObjectStore:
    """The same for who closes it himself."""
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
    with at_place(options) as store:
        return ARCHIVE if next(iter(store.list(LOG)), None) is not None else TIER


def require_known(options: Mapping[str, str], known: frozenset[str]) -> None:
    """Refuse options that nobody would look at."""
    unknown = sorted(name.lower() for name in options if name.lower() not in known)
    if unknown:
        raise InvalidError(
            f"there is no option {unknown[0]} here", do=f"options are {' '.join(sorted(known))}"
        )


def require_columns(names: list[str], more: Callable[[], frozenset[str]] | None = None) -> None:
    """See that there are columns of these names: one that nobody has would be null in each row, and a slip go unseen.

    Args:
        more: Tells the columns beside those of every message: Kafka's, and of decoded bodies.

    Raises:
        InvalidError: There are none, or one is nobody's.
    """
    if not names:  # batches without a column have no rows: there would be none, whatever there is
        raise InvalidError("no column is asked for", do=f"columns are {DDL}")
    known = {*archive_schema().names}
    if more and not known.issuperset(names):
        known |= more()
    for name in names:
        if name in known:
            continue
        meant, some = nearest(name, known, 0.75), sorted(n for n in known if n.startswith(PREFIX))
        ours = f"columns are {DDL}" + (f", and of bodies {', '.join(some)}" if some else "")
        do = f"did you mean {meant}?" if meant else ours
        raise InvalidError(f"there is no column {name} in what is read", do=do)


def isolation_option(options: Mapping[str, str]) -> Isolation | None:
    """What is wished of Kafka's transactions; None: nothing, so what an archive has, else what was committed."""
    said = options.get("isolation")
    levels = [one.value for one in Isolation]
    if said not in {None, *levels}:
        raise InvalidError(f"the option isolation is {said!r:.40}", do=f"say {' or '.join(levels)}")
    return None if said is None else Isolation(said)


def require_isolation(options: Mapping[str, str], state: ArchiveState) -> None:
    """See that an archive has the isolation that is wished."""
    wish = isolation_option(options)
    for one in state.sources.values() if wish else ():
        if wish and one.isolation not in {"", wish.value}:
            raise InvalidError(
                f"what is archived of {one.cluster}/{one.broker} is {one.isolation}",
                do="leave the isolation out, or read the tier itself",
            )


def takes(options: Mapping[str, str], wanted: Selection, key: Key) -> bool:
    """Whether anything of a queue may be wanted."""
    names = {"cluster": key.cluster, "broker": key.broker}
    if any(options.get(name) not in {None, text} for name, text in names.items()):
        return False
    return not wanted.refuses(ArchiveQueue(*key, 0))


def choice(options: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    """An option with a few values, the first being the default."""
    said = options.get(name, values[0])
    if said not in values:
        raise InvalidError(f"the option {name} is {said!r:.40}", do=f"say {' or '.join(values)}")
    return said


def whole(options: Mapping[str, str], name: str, default: int | None) -> int | None:
    """An option that is a number above 0."""
    said = options.get(name)
    if said is None:
        return default
    if not said.isascii() or not said.isdigit() or not int(said):
        raise InvalidError(f"the option {name} is not a number above 0: {said!r:.40}")
    return int(said)


def require_values(options: Mapping[str, str]) -> None:
    """See that options of a tier have values that readers take, who look at them on workers only, or not at all."""
    choice(options, "on-bad", (FAIL, SKIP))
    isolation_option(options)
    partition_bytes(options)


def partition_bytes(options: Mapping[str, str]) -> int:
    """How many bytes of a tier one task reads, about."""
    return whole(options, "partition-bytes", None) or _PARTITION_BYTES


def in_one_option(text: str) -> str:
    """A long text, as an option may have it."""
    return base64.b64encode(zlib.compress(text.encode("utf-8", "surrogateescape"))).decode()


def unpacked(option: str) -> str:
    """Undo ``in_one_option``."""
    try:
        found = zlib.decompress(base64.b64decode(option, validate=True))
        return found.decode("utf-8", "surrogateescape")
    except (ValueError, zlib.error) as error:
        raise InvalidError("the option pinned is none that this program has made") from error


# -- states of brokers -----------------------------------------------------------------------------
#
# The states of all brokers of a tier, or of the one that options name, and of the archive beside it, if there is one;
# followed from one read to the next. One thread.
#
# Order: the tier first, then the archive. What moves from one to the other in between, and expires, is then in the
# archive at least. If the broker truncated something in between, and the archive has dealt with it already, the tier
# is read again: else messages of two histories would stand side by side.

_TRIES = 3


class TierStates:
    """Follows the journals, and the archive's log."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Open the stores; nothing is read yet."""
        self._options = options
        self._store = open_place(options)
        self._readers: dict[Place, TierReader] = {}
        # What the log of the archive beside the tier says; None: there is none.
        self.archive: ArchiveState | None = None
        self._beside = open_place(_beside(options)) if "archive" in options else None
        self._log = JournalReader(self._beside, LOG, ArchiveMachine()) if self._beside else None

    def read(self) -> dict[Place, TierState]:
        """As they are now.

        Raises:
            InvalidError: There is no such tier, or no such archive.
        """
        tries = _TRIES
        while True:
            states, tries = self._read(), tries - 1
            if self._beside is None:
                return states
            self.archive = read_archive(self._beside, self._log)
            if not tries or not is_ahead(self.archive, states):
                return states  # what it does not know at the last try is of a journal that was rebuilt since

    def close(self) -> None:
        """Close the stores."""
        self._store.close()
        if self._beside is not None:
            self._beside.close()

    def _read(self) -> dict[Place, TierState]:
        for place in self._places():
            if place not in self._readers:
                self._readers[place] = TierReader(self._store, place.prefix)
            self._readers[place].refresh()
        return {place: reader.state for place, reader in self._readers.items()}

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
