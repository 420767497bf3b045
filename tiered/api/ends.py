"""Whether the two ends of an attachment go together: this store, and that tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.probe import probe
from tiered.errors import InvalidError

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from backends.base import Capabilities, ObjectStore
    from tiered.api.broker_place import Place
    from tiered.local.face import StoreIdentity


def require_conditional_writes(
    store: ObjectStore, rng: random.Random, where: str, *, below: str = ""
) -> Capabilities:
    """Refuse an object store on which two writers could not be kept apart; what the store can do.

    Args:
        store: Which.
        rng: For the names of the objects that it is tried with.
        where: The store, for people.
        below: Prefix of these objects, for who may write only there.

    Raises:
        InvalidError: It does not write conditionally.
        BackendError: It does not answer, or refuses us.
    """
    found = probe(store, f"{rng.getrandbits(64):016x}", below=below)
    if not (found.put_if_absent and found.compare_and_set):
        raise InvalidError(
            "this store does not write conditionally, so two writers could not be kept apart",
            where=where,
            do="use AWS S3, MinIO, versitygw, LocalStack, or a local folder",
        )
    return found


def store_document(identity: StoreIdentity, place: Place) -> dict[str, Any]:
    """What a tier remembers of the local store that it belongs to."""
    return {
        "cluster": place.cluster,
        "broker": place.broker,
        "store_id": identity.store_id,
        "kind": identity.kind,
    }


def require_same_store(known: Mapping[str, Any], mine: Mapping[str, Any], where: str) -> None:
    """Refuse a tier of another store.

    Args:
        known: What the tier remembers; empty when it is new.
        mine: What the local store is.
        where: The tier, for people.

    Raises:
        InvalidError: They are not the same.
    """
    if known and (known["cluster"], known["broker"]) != (mine["cluster"], mine["broker"]):
        raise InvalidError(  # as where a folder takes names for one that differ only in case
            f"this tier belongs to {known['cluster']}/{known['broker']},"
            f" not to {mine['cluster']}/{mine['broker']}",
            where=where,
            do="choose another URL, or name this broker's place with --cluster and --broker",
        )
    if known and known["store_id"] and mine["store_id"] and known["store_id"] != mine["store_id"]:
        raise InvalidError(
            f"this tier belongs to another store ({known['cluster']}/{known['broker']},"
            f" id {known['store_id']}); this one has id {mine['store_id']}",
            where=where,
            do="choose another URL, or name this broker's place with --cluster and --broker",
        )
