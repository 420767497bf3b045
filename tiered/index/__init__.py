"""The key index of a tier: making, reading, and the local file in between. See ``docs/formats/key-index.md``."""
