"""Makes the pictures of docs/web.md again: `PYTHONPATH=tests:. python tests/web/pictures.py`, with Chromium installed."""

from __future__ import annotations

import base64
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from support.captures import unpack
from support.chromium import browser
from support.command_line import SMALL, attach, here
from support.pages import served

from tiered.api.broker_place import Place

if TYPE_CHECKING:
    from support.chromium import Browser
    from support.pages import Pages

DOCS = Path(__file__).parents[2] / "docs" / "web"
NORTH = ("--cluster", "shop", "--broker", "north")


def orders(folder: Path, first: int, count: int) -> Path:
    """Lines of some orders."""
    rng, path = random.Random(first), folder / "lines"
    with path.open("w") as out:
        for number in range(first, first + count):
            body = {"order": number, "state": "paid", "amount": rng.randrange(100, 99999) / 100,
                    "lines": [{"sku": f"A-{rng.randrange(999):03}", "count": 1}]}  # fmt: skip
            row = {
                "topic": rng.choice(["orders", "orders", "payments", "shipments"]),
                "queue_id": number % 4,
                "keys": f"order-{number}",
                "tags": rng.choice(["paid", "sent"]),
                "body_base64": base64.b64encode(json.dumps(body).encode()).decode(),
            }
            out.write(json.dumps(row) + "\n")
    return path


def build(folder: Path) -> str:
    """Three brokers: one that goes on, one with timers, one whose journal is damaged."""
    tier, url = folder / "tier", f"file://{folder}/tier"
    here("store", "create", folder / "store").good()
    here("store", "put", folder / "store", orders(folder, 0, 4000)).good()
    attach(folder / "store", tier, *NORTH, *SMALL, "--seal")
    here("archive", url, *NORTH, "--to", f"file://{folder}/parquet", "--topics", "orders").good()
    delayed = unpack("s02-delay-timer", folder)
    south = ("--cluster", "shop", "--broker", "south")
    attach(delayed, tier, *south)
    here("timer", "import", delayed, "--to", url, "--near", "0s", *south).good()
    attach(unpack("s01-basic", folder), tier, "--cluster", "shop", "--broker", "east")
    for path in (tier / Place("shop", "east").prefix / "journal").iterdir():
        path.chmod(0o644)
        path.write_bytes(b"?" + path.read_bytes()[1:])
    return url


def grow(folder: Path, pages: Pages) -> None:
    """Messages come, and are tiered now and then, while somebody looks."""
    rng = random.Random(8)
    for step in range(24):
        here(
            "store",
            "put",
            folder / "store",
            orders(folder, 10_000 + step * 200, rng.randrange(20, 200)),
        )
        if step % 6 == 5 and step < 20:
            attach(folder / "store", folder / "tier", *NORTH, *SMALL)
        pages.good("/")
        time.sleep(0.4)


def take(tab: Browser, pages: Pages, name: str, path: str, **more: object) -> None:
    size = {key: more.pop(key) for key in ("width", "height", "dark") if key in more}
    target = pages.address.rstrip("/") + path + (f"?{urlencode(more)}" if more else "")
    tab.show(target, **{"width": 1000, "height": 640, **size})
    (DOCS / f"{name}.png").write_bytes(tab.picture())


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    folder = Path(tempfile.gettempdir(), "shop")  # the pictures show where the tier lies
    folder.mkdir()
    try:
        url = build(folder)
        options = ("--store", folder / "store", "--archive", f"file://{folder}/parquet")
        north = {"cluster": "shop", "broker": "north"}
        with (
            served(url, *options, "--bodies", "--refresh", "0.3") as pages,
            browser(folder / "profile") as tab,
        ):
            grow(folder, pages)
            take(tab, pages, "brokers", "/", height=430)
            take(tab, pages, "broker", "/broker", height=780, **north)
            take(
                tab,
                pages,
                "queue",
                "/queue",
                topic="orders",
                queue=1,
                height=700,
                dark=True,
                **north,
            )
            take(tab, pages, "messages", "/messages", topic="orders", queue=1, height=520, **north)
            take(tab, pages, "timers", "/timers", cluster="shop", broker="south", height=560)
            take(tab, pages, "narrow", "/topic", topic="orders", width=390, height=780, **north)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
