"""Tiered storage for RocketMQ-format message stores.

Importing this package loads neither NumPy nor an S3 client nor Spark; ``tiered.plugin.open`` is the door of the API.
"""

__distribution__ = "tieredmq"
__version__ = "0.1.0"
