"""Listings of a bucket, asked for and read here, since no client library says whether a listing is whole.

A listing decides what there is, and what is not in it is taken as gone. obstore takes a proxy's page or an empty document
for an empty bucket, and boto3 and obstore alike take a page that says that it goes on, and not where, for the last. Here
each page has to be a ``ListBucketResult`` that says whether it is cut; one that is cut has to say where it goes on, and what
follows has to lie behind it. All else is a failure of the store. Keys come as they are, whatever is in them.

Threads, retries, deadlines: as ``backends.s3_http``. One GET a page.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from backends.base import ObjectInfo, Version
from backends.s3_answers import CUT, FOREIGN
from backends.s3_http import SignedGet
from backends.s3_wire import S3Failure, answered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.s3_settings import S3Settings

_OK: Final = 200
_SERVER_FAULT: Final = 500
_EMPTY_PAGES_MAX: Final = 10_000
"""In a row: a server may look at many keys that it does not show, but not for ever."""


class Lister:
    """Lists one bucket."""

    def __init__(self, settings: S3Settings) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigurationError: The CA bundle or the proxy's address cannot be used.
        """
        self._asking = SignedGet(settings)

    def pages(self, folder: str, start_after: str) -> Iterator[Sequence[ObjectInfo]]:
        """What lies below ``folder`` ("" or ending in a slash) behind a key (""), a page at a time.

        Raises:
            S3Failure: As of any request; with a code of ours when the answer is no whole listing.
        """
        query = {"list-type": "2", "encoding-type": "url", "prefix": folder}
        if start_after:
            query["start-after"] = start_after
        last, empty = "", 0
        while True:
            page = _page(*self._asking.get(query))
            if page.found and page.found[0].key <= last:
                raise S3Failure(_OK, CUT, detail="a page goes on where another began")
            yield page.found
            if not page.token:
                return
            last = page.found[-1].key if page.found else last
            empty = 0 if page.found else empty + 1
            if page.token == query.get("continuation-token") or empty > _EMPTY_PAGES_MAX:
                raise S3Failure(_OK, CUT, detail="it goes on where it was")
            query["continuation-token"] = page.token

    def close(self) -> None:
        """Give back connections."""
        self._asking.close()


class _Page(NamedTuple):
    """One page, and where the next begins ("": it is the last)."""

    found: list[ObjectInfo]
    token: str


def _page(status: int, body: bytes) -> _Page:
    """What an answer says."""
    if status != _OK:
        raise answered(status, body.decode("utf-8", "replace"))
    root = _document(body)
    if root is not None and _name(root) == "Error":  # some servers find out when they have said 200
        raise answered(_SERVER_FAULT, body.decode("utf-8", "replace"))
    if root is None or _name(root) != "ListBucketResult":
        raise S3Failure(status, FOREIGN, detail="it is not a listing")
    parts = {_name(one): one.text or "" for one in root}
    cut, token = parts.get("IsTruncated"), parts.get("NextContinuationToken", "")
    if cut not in {"true", "false"}:
        raise S3Failure(status, FOREIGN, detail="it does not say whether it goes on")
    if cut == "true" and not token:
        raise S3Failure(status, CUT, detail="it goes on, and does not say where")
    is_escaped = parts.get("EncodingType") == "url"
    try:
        found = [_info(one, is_escaped=is_escaped) for one in root if _name(one) == "Contents"]
    except (KeyError, ValueError) as error:
        raise S3Failure(status, FOREIGN, detail="it is not a listing") from error
    return _Page(found, token if cut == "true" else "")


def _document(body: bytes) -> ET.Element | None:
    """The root of a document; None when the bytes are none, or define entities."""
    if b"<!DOCTYPE" in body:
        return None
    try:
        return ET.fromstring(body)  # noqa: S314 (no document type: no entities)
    except (ET.ParseError, ValueError, LookupError):  # the latter two: of an unknown encoding
        return None


def _name(element: ET.Element) -> str:
    """Of an element, without its namespace."""
    return element.tag.rpartition("}")[2]


def _info(element: ET.Element, *, is_escaped: bool) -> ObjectInfo:
    parts = {_name(one): one.text or "" for one in element}
    key, etag = parts["Key"], parts.get("ETag")
    modified = datetime.fromisoformat(parts["LastModified"])
    return ObjectInfo(
        key=unquote_plus(key) if is_escaped else key,
        size_bytes=int(parts["Size"]),
        modified_ms=round(modified.timestamp() * 1000),
        version=None if etag is None else Version(etag),
    )
