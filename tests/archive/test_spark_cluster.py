"""A master and two workers as processes of their own: archive jobs, questions, and reads of a tier run there."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from support.archive_rows import check, said_by_java
from support.command_line import Ran, command, environment, here
from support.spark_processes import PAUSING, SPARK, WORKER, below, job, kill, words_of
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.archive_fixtures import Sealed

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
HOST = "127.0.0.1"
LISTEN = ("--port", "0", "--webui-port", "0")
STREAM = (sys.executable, str(Path(__file__).parents[1] / "spark" / "stream_job.py"))


@contextlib.contextmanager
def standing(name: str, *words: str, folder: Path, host: str = HOST) -> Iterator[str]:
    """A part of Spark's own cluster; what it says."""
    import pyspark

    log = folder / f"{name}.log"
    start = Path(pyspark.__file__).parent / "bin" / "spark-class"
    env = environment() | {
        "SPARK_LOCAL_IP": host,
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [start, f"org.apache.spark.deploy.{words[0]}", *LISTEN, "--host", host, *words[1:]],
            stdout=out,
            stderr=out,
            env=env,
            cwd=folder,
        )
    with process:
        try:
            marks = "alive|registered with master"
            until(lambda: bool(re.search(marks, log.read_text(), re.IGNORECASE)), name, 120)
            yield log.read_text()
        finally:
            kill([*below(process.pid), process.pid])


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a master with two workers of one core each, on hosts of their own: no task runs on one twice at once."""
    folder = tmp_path_factory.mktemp("cluster")
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(standing("master", "master.Master", folder=folder))
        found = re.search(r"spark://127\.0\.0\.1:\d+", said)
        assert found, said
        for number in range(2):
            words = ("--cores", "1", "--memory", "1g", "-d", f"{folder}/work{number}", found[0])
            part, host = ("worker.Worker", *words), f"127.0.0.{number + 1}"
            stack.enter_context(standing(f"worker{number}", *part, folder=folder, host=host))
        yield found[0]


def options(master: str) -> tuple[str, ...]:
    return (*SPARK, "--master", master, "--spark-conf", "spark.executor.memory=600m")


def run(*words: str) -> Ran:
    done = subprocess.run(
        command(words), env=environment(), capture_output=True, timeout=300, check=False
    )
    return Ran(words, done.returncode, done.stdout, done.stderr.decode())


def test_a_job_and_a_question(
    master: str, sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier = sealed("s04-batch-compress")
    ran = run("archive", tier.url, "--to", archive_url, *options(master), "--json").good()
    assert (ran.document["rows"], ran.document["failed"]) == (tier.dump.count, [])
    check(tier, archive_url)
    topic, messages = max(tier.dump.messages.items(), key=lambda pair: len(pair[1]))
    question = f"SELECT count(*) AS n, sum(body_crc) AS crcs FROM `{topic}`"
    said = run("sql", archive_url, question, *options(master), "-o", "jsonl").good()
    crcs = sum(said_by_java(message)["body_crc"] for message in messages)
    assert said.rows == [{"n": len(messages), "crcs": crcs}]


def test_files_are_looked_after_by_tasks(
    master: str, sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path
) -> None:
    """The commands, with executors that are no children of theirs."""
    tier = sealed("s04-batch-compress")
    words = ("archive", tier.url, "--to", archive_url, *options(master), "--json")
    catalog = f"iceberg:sqlite:///{tmp_path}/catalog.db#lake"
    published = run(*words, "--publish", catalog).good().document["published"]
    assert sum(one["added"] for one in published) == len(names(archive_url, "data"))
    lost = Path(names(archive_url, "data")[0])
    lost.write_bytes(lost.read_bytes()[::-1])
    verified = run(*words, "--verify")
    assert (verified.code, len(verified.document["findings"]) > 0) == (1, True)
    again = run(*words, "--repair", "--verify", "--apply", "-").good().document
    assert (again["applied"]["made"], again["applied"]["deleted"]) == (1, 1)
    indexed = run(*words, "--key-index").good().document
    assert indexed["files"] == len(names(archive_url, "data"))
    check(tier, archive_url)


def test_a_run_with_nothing_to_do_starts_no_spark(
    sealed: Callable[[str], Sealed], archive_url: str
) -> None:
    tier = sealed("s04-batch-compress")
    here("archive", tier.url, "--to", archive_url).good()
    nowhere = ("--engine", "spark", "--master", "no such master")
    for more in ((), ("--merge",), ("--repair",)):
        here("archive", tier.url, "--to", archive_url, *nowhere, *more).good()


SPECULATIVE = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.task.duration.threshold": "1s",
}
"""A task that runs for so long gets a second copy, also when it is alone in its job."""


@pytest.mark.parametrize(
    "case",
    [
        ("archive-writing", ()),
        ("archive-written", ()),
        ("archive-rewriting", ("--merge",)),
        ("archive-rewritten", ("--merge",)),
    ],
    ids=lambda case: case[0],
)
def test_a_second_copy_beside_a_slow_task_does_no_harm(
    case: tuple[str, tuple[str, ...]],
    master: str,
    sealed: Callable[[str], Sealed],
    archive_url: str,
    tmp_path: Path,
) -> None:
    """A task stands still before or behind its write; Spark runs it once more, and takes that. Then the first goes on."""
    (moment, more), tier = case, sealed("s04-batch-compress")
    pause, events = tmp_path / "pause", tmp_path / "events"
    events.mkdir()
    if more:
        here("archive", tier.url, "--to", archive_url, "--pack-below", "0").good()
    conf = {
        **SPECULATIVE,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": events.as_uri(),
        "spark.executorEnv.PAUSE_AT": moment,
        "spark.executorEnv.PAUSE_IN": str(pause),
        "spark.executorEnv.PYTHONPATH": str(PAUSING),
    }
    given = [word for name, value in conf.items() for word in ("--spark-conf", f"{name}={value}")]
    words = ("archive", tier.url, "--to", archive_url, *options(master), *given, *more)
    with job(*words, folder=pause) as running:
        slow = running.paused()
        assert WORKER in words_of(slow)
        code, said = running.end()
        assert code == 0, said
        assert not (pause / "go").exists(), "who stood still is not needed"
        done = names(archive_url)
        running.let_go()
        until(lambda: WORKER not in words_of(slow), "the first copy's worker is gone", 60)
    assert names(archive_url) == done, "it made nothing else"
    assert second_copies(events) >= 1
    if more:
        here("archive", tier.url, "--to", archive_url, "--clean", "--grace", "0s", "--apply", "-")
    check(tier, archive_url)


def names(archive_url: str, below: str = "") -> list[str]:
    folder = Path(archive_url.removeprefix("file://"), below)
    return sorted(str(one) for one in folder.rglob("*.parquet"))


def second_copies(events: Path) -> int:
    """Tasks that Spark began beside a slow copy of them, by its own log."""
    files = [file for file in events.rglob("events*") if file.is_file()]
    lines = [line for file in files for line in file.read_text().splitlines()]
    begun = [json.loads(line) for line in lines if '"SparkListenerTaskStart"' in line]
    assert begun
    return sum(one["Task Info"]["Speculative"] for one in begun)


def test_submitted(
    master: str, sealed: Callable[[str], Sealed], archive_url: str, tmp_path: Path
) -> None:
    """``spark-submit`` chooses the cluster; the program takes the session that it finds."""
    import pyspark

    tier = sealed("s04-batch-compress")
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    conf = ["spark.driver.host=127.0.0.1", "spark.executor.memory=600m", "spark.ui.enabled=false"]
    given = [word for one in conf for word in ("--conf", one)]
    entry = tmp_path / "tiered_job.py"
    entry.write_text("from tiered.__main__ import main\nmain()\n")
    words = ["archive", tier.url, "--to", archive_url, "--engine", "spark"]
    env = environment() | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    ran = subprocess.run(
        [submit, "--master", master, *given, entry, *words],
        env=env,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    planned = here("archive", tier.url, "--to", archive_url, "--json").good().document["planned"]
    assert planned == 0
    check(tier, archive_url)


def test_a_stream(master: str, sealed: Callable[[str], Sealed], tmp_path: Path) -> None:
    """Executors read a tier, and know our module as the driver does."""
    tier = sealed("s04-batch-compress")
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    count = str(tier.dump.count)
    words = [*STREAM, master, tier.url, str(out), str(checkpoint), count]
    subprocess.run(words, env=environment(), check=True, timeout=300)
    found = pq.read_table(out)
    assert found.num_rows == tier.dump.count
    crcs = sum(m["body_crc"] for messages in tier.dump.messages.values() for m in messages)
    assert sum(found["body_crc"].to_pylist()) == crcs


def test_a_stream_whose_driver_is_killed(
    sealed: Callable[[str], Sealed], tmp_path: Path, session: Any
) -> None:
    """Driver and JVM get SIGKILL while batches are under way; in the end each message is there once."""
    tier = sealed("s04-batch-compress")
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    words = [*STREAM, "local[2,4]", tier.url, str(out), str(checkpoint)]
    few, killed = str(tier.dump.count // 12 + 1), 0
    for batch in (1, 4):
        offsets = checkpoint / "offsets" / str(batch)
        with subprocess.Popen([*words, few], env=environment()) as driver:
            until(
                lambda at=offsets, one=driver: at.exists() or one.poll() is not None, "batch", 120
            )  # type: ignore[misc]
            kill([*below(driver.pid), driver.pid])
            driver.wait()
            killed += driver.returncode == -signal.SIGKILL
    assert killed == 2
    left = len(list((checkpoint / "commits").iterdir()))
    subprocess.run([*words, few], env=environment(), check=True, timeout=200)
    assert len(list((checkpoint / "commits").iterdir())) > left
    order = ["topic", "queue_id", "queue_offset"]
    found = session.read.parquet(str(out)).orderBy(order).select(*order).toArrow().to_pylist()
    wanted = [m for topic in sorted(tier.dump.messages) for m in tier.dump.messages[topic]]
    assert found == [{name: message[name] for name in order} for message in wanted]
