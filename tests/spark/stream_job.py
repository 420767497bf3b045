"""A stream of a tier into a folder of Parquet files, as a program: master, URL, folder, checkpoint, messages a batch."""

from __future__ import annotations

import sys

from tiered.spark import driver as spark
from tiered.spark.source import register

if __name__ == "__main__":
    master, url, out, checkpoint, count = sys.argv[1:]
    conf = {"spark.driver.host": "127.0.0.1", "spark.executor.memory": "600m"}
    session = spark.open_session(master, conf)
    register(session)
    stream = session.readStream.format("rmq_tier").option("max-messages", count).load(url)
    query = (
        stream.writeStream.option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start(out, "parquet")
    )
    query.awaitTermination()
    session.stop()
