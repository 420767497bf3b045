"""The one module that knows boto3: AWS profiles and roles, and headers that must be signed.

boto3 costs several times the CPU of obstore, so requests go through it only when a header begins
with ``x-amz-``: AWS refuses such headers unless the signature covers them, and obstore adds custom
headers after signing.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import boto3
from botocore import exceptions
from botocore.config import Config

from backends.base import ObjectInfo, Version
from backends.errors import ConfigurationError
from backends.s3_settings import Credential, Profile
from backends.s3_wire import Condition, S3Failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.buffers import Piece
    from backends.s3_settings import S3Settings

_CONNECT_TIMEOUT_S = 5.0
_CONNECTIONS_MAX = 64
_NOT_SENT = (
    exceptions.EndpointConnectionError,
    exceptions.ConnectTimeoutError,
    exceptions.ProxyConnectionError,
)


def load_profile(name: str | None) -> Profile:
    """Endpoint, region and credentials of an AWS profile, or of the default chain.

    Args:
        name: The profile, or None for what AWS tools would take.

    Raises:
        ConfigurationError: No such profile, or its settings cannot be read.
    """
    try:
        session = boto3.Session(profile_name=name)
        found = session.get_credentials()
        scoped = session._session.get_scoped_config()  # noqa: SLF001 (has no public door)
        services = session._session.full_config.get("services", {})  # noqa: SLF001 (the same)
    except exceptions.BotoCoreError as error:
        raise ConfigurationError(f"cannot use the AWS profile: {error}") from error
    own = services.get(scoped.get("services", ""), {}).get("s3", {})
    endpoint = own.get("endpoint_url") or scoped.get("endpoint_url")

    def credential() -> Credential:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(found, "_expiry_time", None),  # of those that expire
        }

    return Profile(endpoint, session.region_name, None if found is None else credential)


class BotoWire:
    """An ``S3Wire`` over boto3. Its deadline counts anew for each piece that arrives."""

    def __init__(self, settings: S3Settings) -> None:
        """Make a client; nothing is sent."""
        self._bucket = settings.bucket
        self._extra: dict[str, str] = {}
        if settings.sse_kms_key_id is not None:
            self._extra = {
                "ServerSideEncryption": "aws:kms",
                "SSEKMSKeyId": settings.sse_kms_key_id,
            }
        credential = settings.credentials()
        self._client = boto3.client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region,
            aws_access_key_id=credential["access_key_id"],
            aws_secret_access_key=credential["secret_access_key"],
            aws_session_token=credential.get("token"),
            config=_config(settings),
        )
        headers = dict(settings.headers)

        def add_headers(request: Any, **_: object) -> None:  # noqa: ANN401 (boto3 ships no types)
            for name, value in headers.items():
                request.headers[name] = value

        self._client.meta.events.register("before-sign.s3", add_headers)

    def put(self, key: str, pieces: Sequence[Piece], condition: Condition) -> str:
        """See ``S3Wire``."""
        etag = condition.etag
        when = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        with _failures():
            answer = self._client.put_object(
                Bucket=self._bucket, Key=key, Body=b"".join(pieces), **when, **self._extra
            )
            return str(answer["ETag"])

    def get(self, key: str) -> tuple[bytes, str]:
        """See ``S3Wire``."""
        with _failures():
            answer = self._client.get_object(Bucket=self._bucket, Key=key)
            with closing(answer["Body"]) as body:
                return bytes(body.read()), str(answer["ETag"])

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See ``S3Wire``."""
        with _failures():
            answer = self._client.get_object(
                Bucket=self._bucket, Key=key, Range=f"bytes={start}-{end - 1}"
            )
            with closing(answer["Body"]) as body:
                return bytes(body.read())

    def head(self, key: str) -> ObjectInfo:
        """See ``S3Wire``."""
        with _failures():
            answer = self._client.head_object(Bucket=self._bucket, Key=key)
            modified_ms = round(answer["LastModified"].timestamp() * 1000)
            version = Version(answer["ETag"])
            return ObjectInfo(key, answer["ContentLength"], modified_ms, version)

    def list(self, folder: str, start_after: str) -> Iterator[Sequence[ObjectInfo]]:
        """See ``S3Wire``."""
        with _failures():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=folder, StartAfter=start_after
            )
            for page in pages:  # the last one may lack "Contents"
                yield [
                    ObjectInfo(
                        found["Key"],
                        found["Size"],
                        round(found["LastModified"].timestamp() * 1000),
                        Version(found["ETag"]),
                    )
                    for found in page.get("Contents", [])
                ]

    def delete(self, key: str) -> None:
        """See ``S3Wire``."""
        with _failures():
            self._client.delete_object(Bucket=self._bucket, Key=key)

    def rules(self) -> tuple[str, Sequence[dict[str, Any]]]:
        """Whether the bucket keeps old versions (``Enabled``, ``Suspended``, or ""), and its lifecycle rules."""
        with _failures():
            versioning = self._client.get_bucket_versioning(Bucket=self._bucket).get("Status", "")
            try:
                answer = self._client.get_bucket_lifecycle_configuration(Bucket=self._bucket)
            except exceptions.ClientError as error:
                if error.response.get("Error", {}).get("Code") != "NoSuchLifecycleConfiguration":
                    raise
                answer = {}
            return str(versioning), answer.get("Rules", [])

    def close(self) -> None:
        """See ``S3Wire``."""
        self._client.close()


def _config(settings: S3Settings) -> Config:
    return Config(
        connect_timeout=min(_CONNECT_TIMEOUT_S, settings.timeout_s),
        read_timeout=settings.timeout_s,
        retries={"total_max_attempts": 1},  # a conditional PUT tried again meets its own object
        max_pool_connections=_CONNECTIONS_MAX,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version="s3v4",
        s3={
            "addressing_style": "path" if settings.path_style else "virtual",
            "payload_signing_enabled": settings.sign_payload,
        },
    )


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except exceptions.ClientError as error:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(error.response.get("Error", {}).get("Code", ""))
        raise S3Failure(status, "" if code.isdigit() else code) from error
    except _NOT_SENT as error:
        raise S3Failure(0, sent=False, detail=type(error).__name__) from error
    except (exceptions.BotoCoreError, OSError) as error:
        raise S3Failure(0, detail=type(error).__name__) from error
