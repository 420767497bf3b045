"""Object stores: the lowest layer, which knows nothing of queues.

``backends.base.ObjectStore`` is the interface, ``backends.registry.open_store`` makes one from a URL, and
``backends.testing`` ships the contract suite that every implementation passes.
"""

__distribution__ = "tieredmq"
