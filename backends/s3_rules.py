"""What a bucket's own rules would do to a tier in it. Read-only; for ``tiered doctor``."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from backends.errors import ConfigurationError
from backends.s3_errors import RULES, to_error
from backends.s3_settings import check_options, resolve, split_location
from backends.s3_wire import S3Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol

    from backends.s3_options import S3Options

    class _Wire(Protocol):
        def rules(self) -> tuple[str, Sequence[dict[str, Any]]]: ...

        def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BucketRules:
    """What is set for a bucket.

    Attributes:
        versioning: ``Enabled``, ``Suspended``, or "" when it never was.
        harmful: Lifecycle rules that delete or move away objects of the tier, a clause each.
    """

    versioning: str
    harmful: tuple[str, ...]


def plain_http_host(location: str, options: S3Options) -> str:
    """Host of the endpoint when nothing is encrypted on the way, else "".

    Raises:
        ConfigurationError: A wrong option.
    """
    settings = resolve(split_location(location)[0], options, os.environ)
    if not settings.is_plain_http or settings.endpoint_url is None:
        return ""
    return settings.endpoint_url.partition("://")[2].rpartition(":")[0] or settings.endpoint_url


def read_rules(location: str, options: S3Options) -> BucketRules:
    """Ask the server for the rules of the bucket in ``bucket/prefix``.

    Raises:
        ConfigurationError: A wrong option.
        BackendError: It does not say.
    """
    bucket, prefix = split_location(location)
    check_options(options)
    try:
        module = importlib.import_module("backends.s3_control")
    except ImportError as error:
        raise ConfigurationError("s3:// needs more libraries: install tieredmq[s3]") from error
    settings = resolve(bucket, options, os.environ)
    wire = cast("Callable[..., _Wire]", module.BotoWire)(settings)
    try:
        versioning, rules = wire.rules()
    except S3Failure as failure:
        where = f"rules of bucket {bucket}"
        raise to_error(
            failure, write=False, where=where, endpoint=settings.server, permission=RULES
        ) from failure
    finally:
        wire.close()
    return BucketRules(versioning, tuple(harm for rule in rules if (harm := harm_of(rule, prefix))))


def harm_of(rule: dict[str, Any], prefix: str) -> str:
    """What a lifecycle rule would do to objects below ``prefix``; "" when nothing that hurts."""
    chosen = rule.get("Filter", {})
    of = rule.get("Prefix") or chosen.get("Prefix") or chosen.get("And", {}).get("Prefix") or ""
    meets = prefix.startswith(of) or of.startswith(prefix)
    if rule.get("Status") != "Enabled" or not meets:
        return ""
    name = f"rule {rule.get('ID', '')!r} for {of or 'all objects'!r}"
    expiration = rule.get("Expiration", {})
    if "Days" in expiration or "Date" in expiration:
        return f"{name} deletes objects by age"
    moves = {str(move.get("StorageClass", "")) for move in rule.get("Transitions", [])}
    away = sorted(moves & {"GLACIER", "DEEP_ARCHIVE"})
    return f"{name} moves objects to {', '.join(away)}" if away else ""
