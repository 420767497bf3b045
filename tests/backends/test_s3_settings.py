"""Where S3 settings come from, and which wins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from backends import s3_settings
from backends.errors import ConfigurationError
from backends.s3_settings import Credential, Profile, S3Options, check_options, resolve

if TYPE_CHECKING:
    from pathlib import Path

KEYS = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret-word",
    "AWS_CONFIG_FILE": "/nonexistent",
}


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Names of the profiles that were loaded; each gives the same."""
    loaded: list[str | None] = []

    def credentials() -> Credential:
        return {"access_key_id": "profile", "secret_access_key": "x", "expires_at": None}

    def load(name: str | None) -> Profile:
        loaded.append(name)
        return Profile("https://profile:1", "profile-1", credentials)

    monkeypatch.setattr(s3_settings, "_load_profile", load)
    return loaded


def test_aws_by_default(profiles: list[str | None]):
    found = resolve("bucket", S3Options(), KEYS)
    assert (found.endpoint_url, found.request_url, found.path_style) == (None, None, False)
    assert (found.region, found.server) == ("us-east-1", "AWS S3 in us-east-1")
    assert found.credentials()["access_key_id"] == "id"
    assert profiles == []


def test_options_win_over_environment_and_profile(profiles: list[str | None]):
    env = KEYS | {
        "AWS_ENDPOINT_URL_S3": "http://s3:1",
        "AWS_ENDPOINT_URL": "http://all:1/",
        "AWS_REGION": "one-1",
        "AWS_DEFAULT_REGION": "two-2",
    }
    assert resolve("b", S3Options(), env).endpoint_url == "http://s3:1"
    assert resolve("b", S3Options(), env).region == "one-1"
    del env["AWS_ENDPOINT_URL_S3"], env["AWS_REGION"]
    assert resolve("b", S3Options(), env).endpoint_url == "http://all:1"
    assert resolve("b", S3Options(), env).region == "two-2"
    options = S3Options(endpoint_url="https://mine/", region="three-3")
    assert resolve("b", options, env).endpoint_url == "https://mine"
    assert resolve("b", options, env).region == "three-3"
    ignoring = env | {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    assert resolve("b", S3Options(), ignoring).endpoint_url is None
    assert profiles == []


def test_profile_fills_what_is_missing(profiles: list[str | None], tmp_path: Path):
    named = resolve("b", S3Options(profile="blue"), KEYS)
    assert named.credentials()["access_key_id"] == "profile"  # one that is named wins over keys
    assert (named.endpoint_url, named.region) == ("https://profile:1", "profile-1")
    (tmp_path / "config").write_text("")
    env = KEYS | {"AWS_CONFIG_FILE": str(tmp_path / "config")}
    unnamed = resolve("b", S3Options(region="r"), env)
    assert unnamed.credentials()["access_key_id"] == "id"
    assert (unnamed.endpoint_url, unnamed.region) == ("https://profile:1", "r")
    bare = resolve("b", S3Options(), {"AWS_CONFIG_FILE": "/nonexistent"})
    assert bare.credentials()["access_key_id"] == "profile"
    assert profiles == ["blue", None, None]


def test_no_credentials(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(s3_settings, "_load_profile", lambda _: Profile(None, None, None))
    with pytest.raises(ConfigurationError, match="AWS_ACCESS_KEY_ID"):
        resolve("b", S3Options(), {})


@pytest.mark.parametrize(
    ("endpoint", "path_style", "request_url"),
    [
        ("http://host:9000", None, "http://host:9000"),
        ("http://host:9000", True, "http://host:9000"),
        ("http://host:9000", False, "http://bucket.host:9000"),
        ("https://host/below", False, "https://bucket.host/below"),
    ],
)
def test_path_style_is_the_default_of_a_custom_endpoint(
    endpoint: str, path_style: bool | None, request_url: str
):
    options = S3Options(endpoint_url=endpoint, path_style=path_style)
    found = resolve("bucket", options, KEYS)
    assert found.path_style is (path_style is not False)
    assert found.request_url == request_url
    assert found.is_plain_http is endpoint.startswith("http://")


def test_secrets_are_not_shown():
    options = S3Options(headers={"x-token": "other-word"})
    found = resolve("bucket", options, KEYS)
    assert found.credentials()["secret_access_key"] == "secret-word"
    assert "secret-word" not in repr(found)
    assert "other-word" not in repr(found)


@pytest.mark.parametrize("url", ["https://s3.example/minio", "http://s3:9000/bucket/prefix/"])
def test_an_endpoint_with_a_path_is_told_unless_somebody_says_that_it_is_meant(url: str):
    with pytest.raises(ConfigurationError, match=r"--endpoint-url has a path: .*--path-style"):
        check_options(S3Options(endpoint_url=url))
    with pytest.raises(ConfigurationError, match="AWS_ENDPOINT_URL_S3 has a path"):
        resolve("b", S3Options(), {**KEYS, "AWS_ENDPOINT_URL_S3": url})
    meant = S3Options(endpoint_url=url, path_style=True)
    check_options(meant)
    assert resolve("b", meant, KEYS).endpoint_url == url.rstrip("/")
