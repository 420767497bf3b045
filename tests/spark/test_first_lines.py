"""The first lines of docs/spark.md as a newcomer runs them: by the path of a virtual environment that is not activated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiers
from support.streams import Shop

from tiered.keys import broker_prefix

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text("utf-8")
BLOCK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
PROGRAM = """
import json
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
{block}
found = [orders.count(), recent.count(), every.count()]
said = []
for options in ({{"path": "{url}/nothing"}}, {{"path": "{url}/tier", "topic": "nope"}}, {{"path": "{url}/tier", "x": "y"}}):
    try:
        spark.read.format("tieredmq").options(**options).load().count()
    except Exception as error:
        said.append(str(error))
print(json.dumps([found, said]))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.spark
def test_they_run_and_errors_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "PREFIX", broker_prefix("c", "b"))
    shop = Shop(tmp_path)
    for body in (b"a", b"b"):
        shop.add(body)
    shop.run()
    for store in shop.stores:
        store.close()
    other = tmp_path / "path"
    other.mkdir()
    python = other / "python3"
    python.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'tiered'\" >&2\nexit 1\n"
    )
    python.chmod(0o755)
    url = f"file://{tmp_path}"
    block = BLOCK.replace("s3://bucket2/parquet", f"{url}/parquet").replace(
        "s3://bucket/prefix", f"{url}/tier"
    )
    named = {name: text for name, text in os.environ.items() if not name.startswith("PYSPARK")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(block=block, url=url)],
        env={**named, "PATH": f"{other}:{os.environ['PATH']}"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()[-3000:]
    found, said = json.loads(ran.stdout.splitlines()[-1])
    assert found == [2, 4, 4]  # of each queue one is not sealed
    for text, what in zip(
        said, ("there is no tier here", "no topic nope", "no option x"), strict=True
    ):
        assert what in text
        assert "Traceback" not in text
        assert len(text.strip().splitlines()) <= 2  # the second is Spark's SQLSTATE
