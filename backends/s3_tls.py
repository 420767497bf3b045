"""TLS to an S3 server: whom to trust, and what to say when the server is not trusted.

Certificates are always verified, host names too; nothing switches that off. Whom to trust: the system's authorities, and
those of a file that is named (``S3Options.ca_bundle``, ``AWS_CA_BUNDLE``, or ``ca_bundle`` of the AWS profile).
"""

from __future__ import annotations

from pathlib import Path

from backends.errors import ConfigurationError
from backends.regular import read_regular
from backends.s3_wire import S3Failure

UNKNOWN = "unknown"
OTHER_NAME = "other-name"
EXPIRED = "expired"
NO_TLS = "no-tls"
_WORDS = {
    UNKNOWN: "no known authority has signed its certificate; if it should be trusted, name a PEM file"
    " of its authority with --ca-bundle or AWS_CA_BUNDLE",
    OTHER_NAME: "its certificate is for another host name; give the endpoint by a name that is in it",
    EXPIRED: "its certificate is not valid at this time; renew it, or set the clock",
    NO_TLS: "it does not speak TLS; if messages may go unencrypted, say http:// in the endpoint",
}
_MARK = b"-----BEGIN CERTIFICATE-----"


def untrusted(reason: str) -> S3Failure:
    """The failure of a request that was not sent since the server is not trusted.

    Args:
        reason: One of the words of this module, or another that is shown as it is.
    """
    detail = _WORDS.get(reason, f"its certificate is refused: {reason}")
    return S3Failure(0, sent=False, detail=detail, untrusted=True)


def read_ca_bundle(path: str) -> bytes:
    """The certificates of a PEM file.

    Raises:
        ConfigurationError: It cannot be read, or holds no certificate.
    """
    try:
        data = read_regular(Path(path).expanduser())
    except OSError as error:
        raise ConfigurationError(
            f"the CA bundle cannot be read: {error.strerror or error} ({path})"
        ) from error
    if _MARK not in data:
        raise ConfigurationError(f"the CA bundle has no certificate in PEM form ({path})")
    return data
