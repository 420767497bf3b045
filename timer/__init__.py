"""Long-delay messages in hourly files of the tier: they leave the broker's disk and return in time.

``hour_files`` holds the hourly files and makes them durable, ``records`` reads what lies in them, ``dequeue`` takes them in
due order, ``handover`` gives them back and ``progress`` keeps how far it is; ``local_target`` and ``broker_target`` take
them.
"""

__distribution__ = "tieredmq"
