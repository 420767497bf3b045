"""Lists the files of a topic, and reads the first by pandas: python read_files.py URL TOPIC"""

import sys

import fsspec
import pandas as pd


def main(url: str, topic: str) -> None:
    names = fsspec.filesystem("tiered", url=url).glob(f"{topic}/*/*.jsonl")
    print(*names, sep="\n")
    frame = pd.read_json(f"tiered://{names[0]}", lines=True, storage_options={"url": url})
    print(frame["queue_offset"].min(), frame["queue_offset"].max())


if __name__ == "__main__":
    if not sys.argv[2:]:
        sys.exit(__doc__)
    main(*sys.argv[1:3])
