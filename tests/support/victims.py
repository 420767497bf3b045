"""Where the tiers of torture lie, and the store that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support import captures, command_line, tier_checks
from support.command_line import here
from support.growing import Growing, first_ms
from support.servers import S3Server

if TYPE_CHECKING:
    import random
    from pathlib import Path

NAME = "s05-crash"
FAST = ("--freshness", "0.1", *command_line.SMALL)


class Victim:
    """A store that grows, and a tier whose writers are killed.

    Attributes:
        growing: The store; its broker runs.
        url: Of the tier.
        kills: So far.
    """

    def __init__(self, whole: Path, folder: Path, url: str) -> None:
        folder.mkdir()
        self.growing = Growing(whole, folder / NAME)
        self.growing.start(first_ms(NAME) - 1000)
        self.url = url
        self.kills = 0
        self._known = 0

    def grow(self, size_bytes: int) -> None:
        """Messages arrive."""
        self.growing.grow(min(self.growing.whole_end, self.growing.end + size_bytes))

    def grow_by_chance(self, rng: random.Random, size_bytes_max: int) -> None:
        """A few or many messages arrive, the last perhaps not whole."""
        self.grow(rng.randrange(1, size_bytes_max))

    @property
    def is_whole(self) -> bool:
        """Nothing is left that could arrive."""
        return self.growing.end >= self.growing.whole_end

    def check(self) -> None:
        """After a kill: every byte is in order, and what was there is there."""
        self.kills += 1
        ran = here("status", self.url, "--json")
        if ran.code == 2:  # killed before there was a tier
            assert self._known == 0
            return
        messages = int(ran.good().document["brokers"][0]["messages"])
        assert messages >= self._known
        self._known = messages
        here("verify", self.url, "--deep").good()

    def finish(self) -> None:
        """The last writer brings the tier level; it holds what the store holds, once, in order, byte for byte."""
        self.growing.grow(self.growing.whole_end)
        self.growing.crash()
        here("attach", self.growing.store, "--to", self.url, "--once").good()
        tier_checks.check_equal(self.url, captures.captured(NAME))
        tier_checks.check_sound(self.url, self.growing.store)

    def close(self) -> None:
        """Give the broker's lock back."""
        self.growing.crash()


def url_of(kind: str, server: object, folder: Path) -> str:
    """A tier that is not there yet, in a folder or on a server."""
    if kind == "folder":
        return f"file://{folder}/tier"
    assert isinstance(server, S3Server)
    return f"s3://{server.bucket()}/tier"
