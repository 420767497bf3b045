"""The script that draws charts: it counts what Python counts, and makes small pictures of it, the same each time."""

from __future__ import annotations

import importlib.util
import struct
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.archive_jobs import small
from support.shop import HOUR_MS

from backends.registry import open_store
from backends.s3_settings import S3Options

if TYPE_CHECKING:
    from types import ModuleType

    from support.shop import Shop

DOCS = Path(__file__).parents[2] / "docs"
CHARTS = ["bytes", "latency", "rate", "sizes"]
SIZE_BYTES_MAX = 60 * 1024


@pytest.fixture(scope="module")
def plots(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        path = DOCS / "examples" / "analytics" / "plots.py"
        spec = importlib.util.spec_from_file_location("plots", path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(plots: ModuleType, shop: Shop) -> dict[str, Any]:
    store = open_store(shop.archive, S3Options())
    try:
        return plots.measure(store, ["*"])
    finally:
        store.close()


def test_what_is_counted(found: dict[str, Any], shop: Shop, plots: ModuleType) -> None:
    assert (found["step_ms"], found["steps"]) == (HOUR_MS, 24)
    assert found["topics"].keys() == {one.message.topic for one in shop.sent}
    for topic, counted in found["topics"].items():
        sent = shop.of(topic)
        hours, latency = Counter(one.hour for one in sent), [one.latency_ms for one in sent]
        bins = Counter(int(np.searchsorted(plots.SIZES, len(one.message.body))) for one in sent)
        assert counted["messages"] == len(sent)
        assert counted["rate"] == [hours[hour] for hour in range(24)]
        assert sum(counted["bytes"]) == sum(len(one.message.body) for one in sent)
        assert counted["sizes"] == [bins[number] for number in range(len(plots.SIZES) + 1)]
        assert counted["latency_ms"][-1] == max(latency)
        assert counted["latency_ms"][0] == np.percentile(latency, 50, method="inverted_cdf")


def pixels(file: Path) -> tuple[int, int]:
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_the_pictures_of_the_page_are_there_and_small() -> None:
    page = (DOCS / "analytics.md").read_text("utf-8")
    files = sorted((DOCS / "charts").glob("*.png"))
    assert [file.name for file in files] == ["latency.png", "rate.png", "sizes.png"]
    for file in files:
        assert f"(charts/{file.name})" in page
        assert pixels(file) == (648, 324)
        assert file.stat().st_size < SIZE_BYTES_MAX


def test_the_command_makes_small_pictures_the_same_each_time(
    plots: ModuleType,
    found: dict[str, Any],
    shop: Shop,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = plots.main([shop.archive, "--out", str(tmp_path / "charts")])
    assert capsys.readouterr().out.split() == [str(file) for file in files]
    assert sorted(file.stem for file in files) == CHARTS
    for one, two in zip(files, plots.draw(found, tmp_path / "again"), strict=True):
        assert pixels(one) == (648, 324)
        assert one.read_bytes() == two.read_bytes()
        assert one.stat().st_size < SIZE_BYTES_MAX


def test_what_the_command_cannot_do(plots: ModuleType, shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such topic; there are %RETRY%billing"):
        plots.main([shop.archive, "--topics", "nope,or"])
    with pytest.raises(SystemExit, match="there is no archive here"):
        plots.main([f"file://{tmp_path}/none"])


def test_odd_archives(plots: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes in names, more topics than are shown, few messages."""
    at = small(*(f"quo'te\"{number}" for number in range(8)))
    assert len(plots.measure(at.archive, ["*"])["topics"]) == 8
    some = plots.measure(at.archive, ["*[0-6]"])
    assert sum(one["messages"] for one in some["topics"].values()) == 14
    monkeypatch.setattr(plots, "TOPICS_SHOWN", 5)
    plots.plt.close("all")  # other tests of this process draw, too
    monkeypatch.setattr(plots.plt, "close", lambda _figure: None)
    plots.draw(some, tmp_path)
    titles = [plots.plt.figure(number).axes[0].get_title() for number in plots.plt.get_fignums()]
    monkeypatch.undo()
    plots.plt.close("all")
    assert titles[0] == "Messages (2 more topics not shown)"


@pytest.mark.parametrize(
    ("span_ms", "step_ms", "text"),
    [(1, 1, "1 ms"), (61, 10, "10 ms"), (3_600_000, 60_000, "min"), (86_400_000, 3_600_000, "hour"),
     (10**11, 86_400_000, "day"), (36_000_000, 600_000, "10 min"), (600_000, 10_000, "10 s")],
)  # fmt: skip
def test_steps(span_ms: int, step_ms: int, text: str, plots: ModuleType) -> None:
    assert plots.step_ms(span_ms) == step_ms
    assert plots.step_text(step_ms) == text
