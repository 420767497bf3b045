"""Where S3 settings come from: options first, then the environment, then the AWS profile."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict
from urllib.parse import urlsplit

from backends.base import check_key
from backends.errors import ConfigurationError, InvalidKeyError
from backends.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from datetime import datetime


TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class S3Options:
    """Settings of one S3 store; what is None comes from the environment or the AWS profile."""

    endpoint_url: str | None = None
    """``http://`` or ``https://`` address of the server; only the former is not encrypted."""
    region: str | None = None  # name of the region
    profile: str | None = None  # AWS profile to take credentials and settings from
    path_style: bool | None = None
    """Bucket in the path, not in the host name. Default: yes with an endpoint of one's own, no without."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to every request. Not shown by ``repr``: people put tokens there."""
    sse_kms_key_id: str | None = None  # key with which the server encrypts every object
    ca_bundle: str | None = None  # PEM file of authorities that are trusted beside the system's
    timeout_s: float = TIMEOUT_S
    """Deadline of each request, seconds; one of many bytes has more (``S3Settings.deadline_s``)."""


_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_BYTES_S_MIN = 512 * 1024
"""Slower is a failure: 4 Mbit/s."""
_CONNECT_TIMEOUT_S = 5.0
_REGION_DEFAULT = "us-east-1"
_NEEDS = "s3:// needs libraries that are not installed; pip install 'tieredmq[s3]', or `make setup` in a checkout"
ENDPOINT_OPTION = "--endpoint-url"
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class Credential(TypedDict):
    """A key pair, as obstore takes it."""

    access_key_id: str
    secret_access_key: str
    token: NotRequired[str | None]
    expires_at: datetime | None


CredentialSource = Callable[[], Credential]


@dataclass(frozen=True, slots=True)
class Profile:
    """What an AWS profile or the machine's role gives."""

    endpoint_url: str | None  # set in the profile, or None
    region: str | None  # set in the profile, or None
    credentials: CredentialSource | None = field(repr=False)
    """Gives a key pair that is valid now, or None when there is none at all."""
    ca_bundle: str | None = None  # set in the profile, or None


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Everything a client needs. The credentials are behind a function and never shown."""

    bucket: str  # name
    endpoint_url: str | None  # address of the server, or None for AWS
    region: str  # name of the region
    path_style: bool  # bucket in the path, not in the host name
    headers: Mapping[str, str] = field(repr=False)  # added to every request
    sse_kms_key_id: str | None  # key for encryption by the server, or None
    timeout_s: float  # deadline of a request, but for its bytes
    credentials: CredentialSource = field(repr=False)  # gives a key pair that is valid now
    ca_bundle: str | None = None  # PEM file of authorities to trust beside the system's, or None

    def deadline_s(self, size_bytes: int) -> float:
        """Deadline of a request that moves so many bytes: a slow way to the store is not a failure of it."""
        return self.timeout_s + size_bytes / _BYTES_S_MIN

    @property
    def connect_timeout_s(self) -> float:
        """Deadline of making a connection."""
        return min(_CONNECT_TIMEOUT_S, self.timeout_s)

    @property
    def is_plain_http(self) -> bool:
        """Whether the endpoint says that nothing is encrypted."""
        return self.endpoint_url is not None and self.endpoint_url.startswith("http://")

    @property
    def request_url(self) -> str | None:
        """The endpoint, with the bucket in its host name unless that is in the path."""
        if self.endpoint_url is None or self.path_style:
            return self.endpoint_url
        scheme, _, rest = self.endpoint_url.partition("://")
        return f"{scheme}://{self.bucket}.{rest}"

    @property
    def server(self) -> str:
        """The server, for messages."""
        return self.endpoint_url or f"AWS S3 in {self.region}"


def split_location(location: str) -> tuple[str, str]:
    """Bucket and prefix of ``bucket/prefix``."""
    bucket, _, prefix = location.partition("/")
    if not bucket:
        raise ConfigurationError("no bucket in the S3 URL; write s3://bucket/prefix")
    if "@" in bucket or ":" in bucket:
        raise ConfigurationError(
            "an S3 URL takes no user, password or port; keys come from the environment or an AWS "
            "profile, the server from --endpoint-url"
        )
    if not _BUCKET.fullmatch(bucket):
        raise ConfigurationError(f"not a bucket name: {bucket!r}")
    if "?" in prefix or "#" in prefix:
        raise ConfigurationError("an S3 URL takes no ? or #; write s3://bucket/prefix")
    try:
        if prefix:
            check_key(prefix)
    except InvalidKeyError as error:
        raise ConfigurationError(f"not a prefix for keys: {error}") from error
    return bucket, prefix


def check_endpoint(url: str, origin: str, *, takes_path: bool = False) -> str:
    """The http or https endpoint, which has no user, password or query, without a trailing slash.

    ``takes_path``: the S3 API may lie below a path, as somebody has said by ``path_style``. ``origin``: which option or
    variable says so, for the message.
    """
    shown = repr(re.sub(r"//[^/@]*@", "//***@", re.sub(r"[?#].*", "?***", url)))
    no_address = ConfigurationError(
        f"{origin} is no address of an endpoint: {shown}; write http://host[:port] or https://host[:port]"
    )
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0
    except ValueError:  # a port that is not a number, a bracket that is left open
        raise no_address from None
    is_http = parts.scheme in {"http", "https"} and parts.hostname and has_port
    if not is_http or re.search(r"\s", url):
        raise no_address
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError(
            f"{origin} takes no user, password, query or fragment: {shown}; leave them out"
        )
    if parts.path.strip("/") and not takes_path:
        raise ConfigurationError(
            f"{origin} has a path: {shown}; leave it out (a bucket belongs into the URL of the tier), or add"
            " --path-style (or --virtual-host) where the S3 API really lies below it"
        )
    return url.rstrip("/")


def check_options(options: S3Options) -> None:
    """Refuse options that no request could carry."""
    if options.timeout_s <= 0:
        raise ConfigurationError(f"S3 timeout is not positive: {options.timeout_s}")
    if options.endpoint_url is not None:
        check_endpoint(
            options.endpoint_url, ENDPOINT_OPTION, takes_path=options.path_style is not None
        )
    for name, value in options.headers.items():
        # The value is not shown: it may be a token.
        if not _HEADER.fullmatch(name) or not value.isprintable() or not value.isascii():
            raise ConfigurationError(f"not an HTTP header: {name!r}")


def resolve(bucket: str, options: S3Options, env: Mapping[str, str]) -> S3Settings:
    """Bring together options (which win), environment and profile. May ask a metadata service for a role."""
    endpoint, origin = _endpoint(options, env)
    region = options.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    static = None if options.profile else _static_credentials(env)
    profile = Profile(None, None, None)
    if static is None or (_has_profile(env) and not (endpoint and region)):
        profile = _load_profile(options.profile)
    credentials = static or profile.credentials
    if credentials is None:
        raise ConfigurationError(
            "no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or AWS_PROFILE"
        )
    if endpoint is None and profile.endpoint_url is not None:
        endpoint, origin = profile.endpoint_url, "endpoint_url of the AWS profile"
    path_style = endpoint is not None if options.path_style is None else options.path_style
    return S3Settings(
        bucket=bucket,
        endpoint_url=None
        if endpoint is None
        else check_endpoint(endpoint, origin, takes_path=options.path_style is not None),
        region=region or profile.region or _REGION_DEFAULT,
        path_style=path_style,
        headers=options.headers,
        sse_kms_key_id=options.sse_kms_key_id,
        timeout_s=options.timeout_s,
        credentials=credentials,
        ca_bundle=options.ca_bundle or env.get("AWS_CA_BUNDLE") or profile.ca_bundle,
    )


def _endpoint(options: S3Options, env: Mapping[str, str]) -> tuple[str | None, str]:
    """The endpoint, and what says so."""
    if options.endpoint_url:
        return options.endpoint_url, ENDPOINT_OPTION
    if env.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if env.get(name):
                return env[name], name
    return None, ""


def _static_credentials(env: Mapping[str, str]) -> CredentialSource | None:
    key, secret = env.get("AWS_ACCESS_KEY_ID"), env.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return None
    credential: Credential = {
        "access_key_id": key,
        "secret_access_key": secret,
        "token": env.get("AWS_SESSION_TOKEN"),
        "expires_at": None,
    }
    return lambda: credential


def _has_profile(env: Mapping[str, str]) -> bool:
    """Whether a profile may say something. Asked first, since loading boto3 takes a while."""
    config = env.get("AWS_CONFIG_FILE", "~/.aws/config")
    return bool(env.get("AWS_PROFILE")) or Path(config).expanduser().is_file()


def _load_profile(name: str | None) -> Profile:
    found: Profile = loaded("s3_control").load_profile(name)
    return found


def loaded(module: str) -> Any:  # noqa: ANN401 (a module)
    """A module of this package that needs libraries which may not be installed."""
    try:
        return importlib.import_module(f"backends.{module}")
    except ImportError as error:
        raise ConfigurationError(_NEEDS) from error
