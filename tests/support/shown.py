"""What help texts and pages show, run as it stands: only places and addresses are put in for those that it names."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
from typing import TYPE_CHECKING, NamedTuple

from support import jmq_stores, kafka_stores
from support.captures import unpack
from support.command_line import here, spawn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from subprocess import Popen

    from support.command_line import CommandLine
    from support.servers import S3Server

SERVES = {
    r"attach (?!.*--(once|decommission|recommission))": ("tiering", 0),
    r"mount (?!.*--namesrv)": ("serving", 0),
    r"mount .*--auto": ("member", 0),
    r"web ": ("pages", 0),
    r"store tail .*--follow": ("", 143),
    r"timer run .*--to /": ("handing over", 0),
}
"""What goes on until it is stopped, by a pattern of its words: what it says first, and how it ends then."""
CANNOT = {
    r"hand-back ": (2, "no mount"),
    r"mount .*--replica-of-live": (3, "no living master is known"),
    r"mount .*--namesrv": (3, "name server 127.0.0.1:1"),
    r"attach .*--decommission (?!--accept-pending)": (
        1,
        "--accept-pending gives up what is pending",
    ),
    r"timer run .*--to namesrv": (3, "127.0.0.1:1"),
    r"timer cancel": (2, "no pending message has the id"),
}
"""What asks for what is not here: its exit code, and what it says."""
PLACES = {
    "file:///tmp/tier": "file://{}/tier",
    "file:///data/tier": "file://{}/tier",
    "file:///tmp/parquet": "file://{}/parquet",
    "/data/rocketmq/store": "{}/store",
    "/tmp/store": "{}/store",
    "/var/store": "{}/store",
    "/data/store": "{}/store",
    "/data/other-store": "{}/other-store",
    "/data/tier": "{}/tier",
    "/data/timers": "{}/timers",
    "/data/checkpoints": "{}/checkpoints",
    "/data/orders": "{}/orders",
    "s3://bucket/parquet": "file://{}/parquet-2",
    "/var/lib/kafka/data": "{}/kafka",
    "/disk1/kafka,/disk2/kafka": "{}/kafka",
    "/data/joyqueue/store": "{}/joyqueue",
    "/var/lib/node_exporter": "{}",
    "/tmp/": "{}/",
    "10.0.0.5:9876": "127.0.0.1:1",
    "10.0.0.5:9876,10.0.0.6:9876": "127.0.0.1:1",
    "10.0.0.7:9876,10.0.0.8:9876": "127.0.0.1:1",
}
PORTS = (":10911", ":9400", ":9100", ":8321")


class Step(NamedTuple):
    """A command that a page shows, and what it prints there."""

    command: str
    shown: list[str]


def steps(block: str) -> list[Step]:
    """Each command of a console block, here-documents and continued lines whole."""
    found: list[Step] = []
    is_open = ""
    for line in block.splitlines():
        if is_open:
            found[-1] = Step(f"{found[-1].command}\n{line}", [])
            is_open = "" if line == is_open else is_open
        elif line.startswith("$ "):
            found.append(Step(line[2:], []))
            begun = re.search(r"<<'(\w+)'", line)
            is_open = begun[1] if begun else ""
        elif found[-1].command.endswith("\\"):
            found[-1] = Step(f"{found[-1].command}\n{line}", [])
        else:
            found[-1].shown.append(line)
    return found


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    kind: str
    text: str


def blocks(page: str, text: str) -> Iterator[Block]:
    """Those of a page, those of items of lists too."""
    for lead, kind, inside in re.findall(r"^( *)```(.*)\n((?s:.*?))^\1```$", text, re.MULTILINE):
        yield Block(page, kind, re.sub(rf"^{lead}", "", inside, flags=re.MULTILINE))


def make(root: Path) -> None:
    """A broker's store with timers, its tier, and an archive; below ``root``, by these names."""
    store, tier, archive = root / "store", f"file://{root}/tier", f"file://{root}/parquet"
    unpack("s02-delay-timer", root).rename(store)
    topics = [
        ("orders", 0, "order", 2000), ("orders", 3, "order", 1300), ("Orders", 3, "order", 1300),
        ("prices", 0, "item", 20), ("%RETRY%workers", 0, "a", 3), ("people", 0, "p", 3),
    ]  # fmt: skip
    body = '{"customer": "c", "amount": 5}'
    lines = [
        {"topic": topic, "queue_id": queue, "keys": f"{key}-{number}", "tags": "paid", "body": body,
         "properties": {"region": "eu-1", "amount": f"{number}"}}
        for topic, queue, key, count in topics
        for number in range(count)
    ]  # fmt: skip
    (root / "lines").write_text("\n".join(map(json.dumps, lines)))
    for topic, queues in (("orders", "4"), ("Orders", "4")):
        here("store", "topic", store, topic, "--queues", queues).good()
    here("store", "topic", store, "prices", "--queues", "1", "--compacted").good()
    here("store", "put", store, root / "lines").good()
    here("attach", store, "--to", tier, "--once", "--seal").good()
    here("archive", tier, "--to", archive).good()
    here("compact", tier, "--topic", "prices", "--archive", archive, "--apply", "-").good()
    here("timer", "import", store, "--to", tier, "--near", "0s").good()


class World:
    """What ``make`` has made, copied into a folder of its own, for commands that change it."""

    def __init__(self, folder: Path, made: Path, server: S3Server | None) -> None:
        self._folder = folder
        self._server = server
        self._buckets: dict[str, str] = {}
        for name in ("store", "tier", "parquet"):
            shutil.copytree(made / name, folder / name)
        (folder / "tiered.toml").write_text("quiet = true\n")
        one = {"topic": "orders", "queue_offset": 2000, "body": "one"}
        (folder / "messages.jsonl").write_text(json.dumps(one))

    def put_in(self, line: str, more: Mapping[str, str] | None = None) -> str:
        """The line with our places in it; from left to right, so that nothing that was put in is replaced."""
        places = {name: place.format(self._folder) for name, place in PLACES.items()}
        places |= dict.fromkeys(PORTS, ":0" if "127" in line else "127.0.0.1:0")
        places |= {
            name: self._bucket(name)
            for name in ("s3://bucket/prefix", "s3://bucket2/parquet")
            if name in line
        }
        places |= {name: place.format(self._folder) for name, place in (more or {}).items()}
        self._have(line)
        if re.search(r"tiered (store create|restore) ", line):
            places = {
                name: place.replace(f"{self._folder}/store", f"{self._folder}/new")
                for name, place in places.items()
            }
        names = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
        return re.sub(names, lambda found: places[found[0]], line)

    def _have(self, line: str) -> None:
        """What few commands ask for is made for them."""
        if "/data/other-store" in line:
            shutil.copytree(self._folder / "store", self._folder / "other-store")
        if "kafka" in line and not (self._folder / "kafka").exists():
            kafka_stores.unpack("k01-basic", self._folder).rename(self._folder / "kafka")
        if "joyqueue" in line and not (self._folder / "joyqueue").exists():
            jmq_stores.copy("j01-basic", self._folder).rename(self._folder / "joyqueue")

    def _bucket(self, name: str) -> str:
        """The objects of our folder, in a bucket of their own where there is a server; its URL."""
        folder = self._folder / ("tier" if name == "s3://bucket/prefix" else "parquet")
        if self._server is None:
            return f"file://{folder}"
        if name not in self._buckets:
            bucket, client = self._server.bucket(), self._server.client()
            for path in folder.rglob("*"):
                if path.is_file():
                    key = f"prefix/{path.relative_to(folder)}"
                    client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
            client.close()
            self._buckets[name] = f"s3://{bucket}/prefix"
        return self._buckets[name]

    def run(self, tiered: CommandLine, shown: str, more: Mapping[str, str] | None = None) -> None:
        """A command as it stands, in this process; what serves until it is told to stop is told so."""
        line = self.put_in(shown.replace("\\\n", " "), more)
        line = line.removeprefix('eval "$(').removesuffix(')"')
        said, _, piped = line.rpartition(" | ")
        words = shlex.split(piped, comments=True)
        at = words.index("tiered")
        before, words = words[:at], words[at + 1 :]
        for name, is_set, value in (word.partition("=") for word in before):
            if is_set:
                tiered.environment[name] = value
        target = ""
        if ">" in words:
            target = words[words.index(">") + 1]
            words = words[: words.index(">")]
        if said:
            (self._folder / "stdin").write_text(shlex.split(said)[1] + "\n")
            words.append(str(self._folder / "stdin"))
        call = " ".join(words) + " "
        for pattern, (first, code) in SERVES.items():
            if re.match(pattern, call):
                _stopped(spawn(*words), first, code)
                if words[0] == "attach":  # what follows finds the messages
                    assert tiered(*words, "--once").code in {0, 1}  # pending records are told by 1
                return
        code, told = next((end for has, end in CANNOT.items() if re.match(has, call)), (0, ""))
        ran = tiered(*words)
        assert ran.code == code, f"{call}\n{ran.err}"
        assert told in ran.err, f"{call}\n{ran.err}"
        if target and "~" not in target:
            (self._folder / target).write_bytes(ran.out)


def _stopped(process: Popen[bytes], first: str, code: int) -> None:
    """Wait for its first words, stop it, and look how it ends."""
    assert process.stderr is not None
    assert process.stdout is not None
    with process:
        stream = process.stderr if first else process.stdout
        heard = stream.readline().decode()
        while first not in heard and (line := stream.readline().decode()):
            heard += line
        process.send_signal(signal.SIGTERM)
        err = process.stderr.read().decode()
        assert first in heard, heard + err
        assert process.wait(60) == code, err
