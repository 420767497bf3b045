"""Long-delay messages in hourly files of the tier: they leave the broker's disk and return in time.

``enqueue`` decides what is taken from a local store, ``files`` holds the hourly files, ``writer`` makes them durable,
``dequeue`` reads them in due order, ``handover`` gives them back, ``wheel`` delivers what is near.
"""

__distribution__ = "tieredmq"
