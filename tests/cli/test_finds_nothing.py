"""What finds nothing, or looks at less than one may think, says so; what is misspelled gets a suggestion."""

from __future__ import annotations

import shutil
import signal
import threading
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.command_line import CommandLine, Start
    from support.servers import S3Server


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--from", "2001-01-01", "--until", "2001-01-02"), "between 2001-01-01 and 2001-01-02"),
        (("--from", "2101-01-01"), "stored at or after 2101-01-01"),
        (("--until", "2001-01-01"), "stored before 2001-01-01"),
        (("--offset", "100000"), "from offset 100000 on"),
        (("--tag", "no-such-tag"), "that --tag no-such-tag lets pass"),
    ],
)
def test_cat_that_prints_nothing_says_what_there_is(
    words: tuple[str, ...], said: str, tiered: CommandLine, basic_tier: str
):
    ran = tiered.good("cat", basic_tier, "orders", "--queue", "0", *words)
    assert ran.out == b""
    assert ran.err == f"tiered: no messages {said}; of orders, queue 0 has [0, 312)\n"
    assert tiered.good("cat", basic_tier, "orders", *words, "--quiet").err == ""


def test_cat_with_messages_or_a_count_of_none_says_nothing(tiered: CommandLine, basic_tier: str):
    assert tiered.good("cat", basic_tier, "orders", "--count", "1").err == ""
    assert tiered.good("cat", basic_tier, "orders", "--count", "0").err == ""


def test_query_without_a_hit_says_so(tiered: CommandLine, basic_tier: str):
    ran = tiered("query", basic_tier, "orders", "--key", "nobody", "--until", "2001-01-01")
    assert ran.out == b""
    said = "tiered: no messages of orders with the key 'nobody' stored before 2001-01-01\n"
    assert said in ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody",), "no messages of nobody: the store has no such topic"),
        (("empty",), "no messages of empty; queue 0 has [0, 0)"),
        ((), None),
        (("orders",), None),
        (("nobody", "--count", "0"), None),
    ],
)
def test_store_tail_that_prints_nothing_says_so(
    words: tuple[str, ...], said: str | None, tiered: CommandLine, basic: Path, tmp_path: Path
):
    store = tmp_path / "store"
    shutil.copytree(basic, store)
    index = store / "consumequeue" / "empty" / "0" / f"{0:020d}"
    index.parent.mkdir(parents=True)
    index.write_bytes(bytes(20 * 100))
    ran = tiered.good("store", "tail", store, *words)
    assert ran.err == (f"tiered: {said}\n" if said else "")
    assert (ran.out == b"") is (said is not None or "--count" in words)
    assert tiered.good("store", "tail", store, *words, "--quiet").err == ""


def test_store_tail_of_an_empty_store_says_so(tiered: CommandLine, tmp_path: Path):
    tiered.good("store", "create", tmp_path / "store")
    ran = tiered.good("store", "tail", tmp_path / "store")
    assert (ran.out, ran.err) == (b"", "tiered: no messages: the store has no queues\n")


def test_topics_that_match_nothing_are_said_and_once_ends_with_1(
    tiered: CommandLine, basic: Path, tmp_path: Path
):
    once = ("attach", basic, "--to", f"file://{tmp_path}", "--once", "--topics")
    none = tiered(*once, "oders,no*where", "--json")
    assert (none.code, none.document["unmatched_topics"]) == (1, ["oders", "no*where"])
    assert "tiered: no topic matches --topics oders\n" in none.err
    some = tiered.good(*once, "oders,unicode")
    assert "tiered: no topic matches --topics oders\n" in some.err
    assert "matches" not in tiered.good(*once, "unicode").err


def test_seal_says_what_it_sealed(tiered: CommandLine, basic: Path, tmp_path: Path):
    attach = ("attach", basic, "--to", f"file://{tmp_path}", "--once", "--topics", "orders")
    assert "sealed" not in tiered.good(*attach).err
    assert "tiered: 4 segments sealed\n" in tiered.good(*attach, "--seal").err
    again = tiered.good(*attach, "--seal", "--json")
    assert "tiered: 0 segments sealed\n" in again.err
    assert again.document["sealed_segments"] == 0


def test_repair_says_what_it_did_not_look_at(tiered: CommandLine, basic: Path, basic_tier: str):
    verify = ("verify", basic_tier, "--repair")
    neither = tiered.good(*verify).err
    assert "--repair without --deep" in neither
    assert "--repair without --store" in neither
    assert "--repair without --store" not in tiered.good(*verify, "--store", basic).err
    assert tiered.good(*verify, "--store", basic, "--deep").err == ""


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (("atach",), "no such command 'atach'; did you mean 'attach'?"),
        (("store", "pu"), "no such command 'pu'; did you mean 'put'?"),
        (("xyzzy",), "no such command 'xyzzy'; see"),
        (("cat", "--ofset", "3"), "--offset"),
    ],
)
def test_a_misspelled_command_or_option_gets_a_suggestion(
    words: tuple[str, ...], near: str, tiered: CommandLine
):
    ran = tiered(*words)
    assert ran.code == 2
    assert near in ran.error


def test_a_misspelled_variable_gets_a_suggestion(tiered: CommandLine):
    tiered.environment |= {
        "TIERED_ENDPOINT": "http://127.0.0.1:9000",
        "TIERED_ATTACH_FRESHNES": "3",
        "TIERED_PORT_80_TCP": "a service of Kubernetes",
    }
    said = tiered.good("config", "show").err.splitlines()
    assert said == [
        "tiered: the variable TIERED_ENDPOINT means nothing; did you mean TIERED_ENDPOINT_URL?",
        "tiered: the variable TIERED_ATTACH_FRESHNES means nothing; did you mean TIERED_ATTACH_FRESHNESS?",
    ]


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("ftp://127.0.0.1", "'ftp://127.0.0.1'"),
        ("localhost:9000", "'localhost:9000'"),
        ("http://", "'http://'"),
        ("http://a:x", "'http://a:x'"),
        ("http://a b", "'http://a b'"),
        ("http://me:secret@host", "'http://***@host'"),
        ("http://host?token=secret", "'http://host?***'"),
    ],
)
def test_a_wrong_endpoint_is_named_with_where_it_was_said(
    endpoint: str, shown: str, tiered: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    by_option = tiered("ls", "s3://bucket/p", "--endpoint-url", endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    by_variable = tiered("ls", "s3://bucket/p")
    for ran, origin in ((by_option, "--endpoint-url"), (by_variable, "AWS_ENDPOINT_URL_S3")):
        assert ran.code == 2
        assert ran.error.startswith(origin)
        assert shown in ran.error
        assert "secret" not in ran.error


def test_an_error_of_a_listing_names_no_key(tiered: CommandLine, s3_environment: S3Server):
    ran = tiered("ls", "s3://no-such-bucket-at-all/p")
    assert ran.code == 3
    assert (
        f"no such bucket: s3://no-such-bucket-at-all/p at {s3_environment.endpoint_url}"
        in ran.error
    )


def test_a_wrong_url_is_told_before_anything_is_waited_for(tiered: CommandLine, tmp_path: Path):
    """A follower would wait for the broker's names, or for its first file."""
    for url, words in (
        ("nowhere", "not a URL"),
        (f"file://{tmp_path}/in", "inside the broker"),
        (f"{tmp_path}/in", "inside the broker"),
    ):
        ran = tiered("attach", tmp_path, "--to", url)
        assert ran.code == 2
        assert words in ran.error


def test_an_empty_directory_is_waited_for(start: Start, tiered: CommandLine, tmp_path: Path):
    store, url = tmp_path / "store", f"file://{tmp_path}/tier"
    store.mkdir()
    process = start("attach", store, "--to", url, "--freshness", "0.1")
    try:
        assert b"is empty: waiting for a broker to begin its store there" in (
            process.stderr.readline()
        )
        (tmp_path / "one.jsonl").write_text(
            '{"topic": "t", "queue_id": 0, "properties": {}, "body_base64": ""}'
        )
        tiered.good("store", "create", store)
        tiered.good("store", "put", store, tmp_path / "one.jsonl")
        for _ in range(1200):
            if tiered("cat", url, "t").out:
                break
            threading.Event().wait(0.05)
        else:
            pytest.fail("nothing was tiered")
    finally:
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def test_the_wait_for_an_empty_directory_ends_at_a_signal(start: Start, tmp_path: Path):
    (tmp_path / "store").mkdir()
    process = start("attach", tmp_path / "store", "--to", f"file://{tmp_path}/tier")
    assert b"is empty" in process.stderr.readline()
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert not (tmp_path / "tier").exists()


@pytest.fixture
def archived(tiered: CommandLine, basic_tier: str, tmp_path: Path) -> str:
    url = f"file://{tmp_path}/archive"
    tiered.good("archive", basic_tier, "--to", url, "--seal", "--topics", "orders")
    return url


@pytest.mark.parametrize(
    "words",
    [
        ("--clean", "--topics", "orders"),  # it deleted of all topics
        ("--clean", "--exclude", "orders"),
        ("--repair", "--topics", "orders"),
        ("--key-index", "--topics", "orders"),
        ("--merge", "--from", "2001-01-01"),
        ("--verify", "--until", "2001-01-01"),
        ("--verify", "--body", "json"),
        ("--grace", "1h"),
        ("--merge-below", "1MiB"),
        ("--apply", "-"),
        ("--verify", "--merge"),
        ("--verify", "--key-index"),
        ("--repair", "--clean"),
    ],
)
def test_options_of_archive_that_would_do_nothing_are_refused(
    words: tuple[str, ...], tiered: CommandLine, basic_tier: str, archived: str
):
    ran = tiered("archive", basic_tier, "--to", archived, *words)
    assert ran.code == 2
    assert ("does nothing" in ran.error) or ("contradict each other" in ran.error)


def test_what_a_file_of_settings_says_for_every_run_is_no_error(
    tiered: CommandLine, basic_tier: str, archived: str, tmp_path: Path
):
    settings = tmp_path / "settings.toml"
    settings.write_text('[archive]\ngrace = "1h"\ntopics = ["orders", "to-come"]\n')
    ran = tiered.good("archive", basic_tier, "--to", archived, "--config", settings)
    assert "no topic matches --topics to-come" in ran.err


@pytest.mark.parametrize("name", ["archive", "restore", "expire", "expire by topic"])
def test_a_misspelled_topic_among_others_is_refused_and_nothing_is_done(
    name: str, tiered: CommandLine, basic_tier: str, archived: str, tmp_path: Path
):
    """Beside one that is there it was left out without a word: not restored, never expired, not archived."""
    target = tmp_path / "restored"
    words = {
        "archive": ("archive", basic_tier, "--to", archived, "--topics", "orders,oders"),
        "restore": ("restore", basic_tier, "--to", target, "--topics", "orders,oders"),
        "expire": ("expire", basic_tier, "--topics", "oders", "--ttl", "9000d"),
        "expire by topic": ("expire", basic_tier, "--topic-ttl", "orders=9000d,oders=9000d"),
    }[name]
    ran = tiered(*words)
    assert ran.code == 2
    assert "there is no topic oders" in ran.error
    assert not target.exists()
    globbed = [str(word).replace("oders", "no-such*") for word in words]
    assert "no topic matches --topic" in tiered.good(*globbed).err


def test_an_exclusion_that_keeps_nothing_out_is_said(
    tiered: CommandLine, basic: Path, tmp_path: Path
):
    words = ("attach", basic, "--to", f"file://{tmp_path}/tier", "--once")
    ran = tiered.good(*words, "--topics", "large", "--exclude", "oders,orders")
    assert "no topic matches --exclude oders yet" in ran.err
    assert "--exclude orders" not in ran.err
