"""How to reach an S3-compatible server. No secrets: those come from where AWS tools look."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class S3Options:
    """Settings of one S3 store; what is None comes from the environment or the AWS profile.

    Attributes:
        endpoint_url: ``http://`` or ``https://`` address of the server; only the former is not
            encrypted.
        region: Name of the region.
        profile: AWS profile to take credentials and settings from.
        path_style: Bucket in the path, not in the host name. Default: yes with an endpoint of one's
            own, no without.
        headers: Added to every request. Not shown by ``repr``: people put tokens there.
        sse_kms_key_id: Key with which the server encrypts every object.
        ca_bundle: PEM file of authorities that are trusted beside the system's.
        timeout_s: Deadline of each request, seconds.
        connections_max: Most requests under way at once.
        sign_payload: Let the server check the bytes on arrival, by their hash in the signature.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    sse_kms_key_id: str | None = None
    ca_bundle: str | None = None
    timeout_s: float = TIMEOUT_S
    connections_max: int = 64
    sign_payload: bool = True
