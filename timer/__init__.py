"""Long-delay messages in hourly timer files. Home of TimerFlatFile; nothing is delivered here yet."""

__distribution__ = "tieredmq"
