"""What ``S3Store`` needs of a client library: one request per call, and failures as data.

``backends.s3_obstore`` is the fast one; ``backends.s3_control`` signs headers that it cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import ObjectInfo
    from backends.buffers import Piece


class S3Failure(Exception):  # noqa: N818 (never leaves the backend; S3Store turns it into an error)
    """A request that did not succeed.

    Attributes:
        status: HTTP status of the answer, or 0 when there was none.
        code: S3's error code in it, or "".
        sent: Whether the server may have seen the request.
        detail: What else is known, for the message; no secrets.
        untrusted: There is a server, and its certificate was not accepted; nothing was sent.
    """

    def __init__(
        self,
        status: int,
        code: str = "",
        *,
        sent: bool = True,
        detail: str = "",
        untrusted: bool = False,
    ) -> None:
        """Hold what is known of the failure."""
        super().__init__(status, code, sent, detail)
        self.status = status
        self.code = code
        self.sent = sent
        self.detail = detail
        self.untrusted = untrusted

    def __str__(self) -> str:
        answer = f"{self.status} {self.code}".strip() if self.status else ""
        return ": ".join(filter(None, [answer, self.detail])) or "no answer"


NO_CREDENTIALS = "NoCredentials"
"""Code of a failure of our own: where keys come from gives none, so nothing was sent."""


def no_credentials(cause: str) -> S3Failure:
    """The failure of a request that could not be signed.

    Args:
        cause: Name of the error by which the source ended; its text may hold secrets.
    """
    detail = f"where the AWS settings say that keys come from, there are none now: {cause}"
    return S3Failure(0, NO_CREDENTIALS, sent=False, detail=detail)


class Condition(NamedTuple):
    """When a PUT may happen: only if absent, or only if at ``etag``."""

    etag: str | None = None


class S3Wire(Protocol):
    """Requests for one bucket, with whole keys. No retries. Any thread may call anything.

    Every method raises ``S3Failure`` and nothing else.
    """

    def put(self, key: str, pieces: Sequence[Piece], condition: Condition) -> str:
        """PUT the joined pieces; the new ETag, quoted as the server sent it."""
        ...

    def get(self, key: str) -> tuple[bytes, str]:
        """GET all; the bytes and the ETag."""
        ...

    def get_range(self, key: str, start: int, end: int) -> bytes | memoryview:
        """GET bytes ``[start, end)``, fewer when the object ends inside."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """HEAD."""
        ...

    def list(self, folder: str, start_after: str) -> Iterator[Sequence[ObjectInfo]]:
        """LIST in pages what lies below ``folder`` ("" or ending in a slash) behind a key ("")."""
        ...

    def delete(self, key: str) -> None:
        """DELETE; no failure when nothing was there."""
        ...

    def close(self) -> None:
        """Give back connections."""
        ...
