"""Users and policies of a MinIO server, over its admin API: what ``mc admin`` does, as far as tests need it."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import boto3
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

if TYPE_CHECKING:
    from support.servers import S3Server

_PBKDF2_AES_GCM = b"\x02"
_ROUNDS = 8192
_LAST = b"\x80"


class MinioAdmin:
    """Makes users and policies. Its own keys are the server's root keys."""

    def __init__(self, server: S3Server) -> None:
        self.server = server

    def add_policy(self, name: str, document: dict[str, Any]) -> None:
        """Make or replace a policy."""
        self._put("add-canned-policy", {"name": name}, json.dumps(document).encode())

    def add_user(self, name: str, secret: str, policy: str) -> None:
        """Make a user that may do what a policy says, and nothing else."""
        body = json.dumps({"secretKey": secret, "status": "enabled"}).encode()
        sealed = seal(self.server.secret_key.encode(), body)
        self._put("add-user", {"accessKey": name}, sealed)
        chosen = {"policyName": policy, "userOrGroup": name, "isGroup": "false"}
        self._put("set-user-or-group-policy", chosen)

    def enable(self, name: str, *, enabled: bool) -> None:
        """Let a user in again, or lock it out."""
        status = "enabled" if enabled else "disabled"
        self._put("set-user-status", {"accessKey": name, "status": status})

    def session(self, name: str, secret: str, seconds: int) -> dict[str, Any]:
        """Keys of a session of a user: ``AccessKeyId``, ``SecretAccessKey``, ``SessionToken``, ``Expiration``."""
        client = boto3.client(
            "sts",
            endpoint_url=self.server.endpoint_url,
            aws_access_key_id=name,
            aws_secret_access_key=secret,
            region_name="us-east-1",
        )
        try:
            answer = client.assume_role(
                RoleArn="arn:minio:iam:::role/any", RoleSessionName="test", DurationSeconds=seconds
            )
        finally:
            client.close()
        found: dict[str, Any] = answer["Credentials"]
        return found

    def _put(self, what: str, query: dict[str, str], body: bytes = b"") -> None:
        url = f"{self.server.endpoint_url}/minio/admin/v3/{what}?{urlencode(query)}"
        request = AWSRequest("PUT", url, data=body)
        request.headers["x-amz-content-sha256"] = hashlib.sha256(body).hexdigest()
        keys = Credentials(self.server.access_key, self.server.secret_key)
        SigV4Auth(keys, "s3", "us-east-1").add_auth(request)
        parts = urlsplit(url)
        assert parts.hostname
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        try:
            path = f"{parts.path}?{parts.query}"
            connection.request("PUT", path, body, dict(request.headers.items()))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status in {200, 204}, (what, answer.status, text)


def seal(password: bytes, data: bytes) -> bytes:
    """Encrypt a body for the admin API: one fragment of its format, so at most 16 KiB."""
    assert len(data) <= 1 << 14
    salt, nonce = os.urandom(32), os.urandom(8)
    cipher = AESGCM(hashlib.pbkdf2_hmac("sha256", password, salt, _ROUNDS, 32))
    tag = cipher.encrypt(nonce + (0).to_bytes(4, "little"), b"", b"")
    fragment = cipher.encrypt(nonce + (1).to_bytes(4, "little"), data, _LAST + tag)
    return salt + _PBKDF2_AES_GCM + nonce + fragment
