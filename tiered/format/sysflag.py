"""The bits of a record's ``sysFlag``.

===== ==================================================================
mask  meaning
===== ==================================================================
0x001 the body is compressed (by the producer; brokers store as sent)
0x002 several tags; unused in practice
0x00C transaction: 0x0 none, 0x4 prepared, 0x8 committed, 0xC rolled back
0x010 the born host is IPv6: 16 address bytes in place of 4
0x020 the store host is IPv6
0x040 the client must split the inner batch
0x080 the body is an inner batch
0x700 compression: 0 zlib (old producers), 1 LZ4 frame, 2 zstd, 3 zlib
===== ==================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

COMPRESSED: Final = 0x001
MULTI_TAGS: Final = 0x002
TRANSACTION_MASK: Final = 0x00C
TRANSACTION_NONE: Final = 0x000
TRANSACTION_PREPARED: Final = 0x004
TRANSACTION_COMMIT: Final = 0x008
TRANSACTION_ROLLBACK: Final = 0x00C
BORN_HOST_V6: Final = 0x010
STORE_HOST_V6: Final = 0x020
NEED_UNWRAP: Final = 0x040
INNER_BATCH: Final = 0x080
COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300
V6_EXTRA_BYTES: Final = 12
"""How many bytes an IPv6 host takes more than an IPv4 host."""


def v6_extra_bytes(sys_flag: int) -> int:
    """Bytes by which the hosts of a record with this flag make it longer: 0, 12 or 24."""
    return V6_EXTRA_BYTES * ((sys_flag >> 4 & 1) + (sys_flag >> 5 & 1))


def is_listable(sys_flags: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Which records consume queues list: not those of prepared and rolled-back transactions."""
    state = sys_flags & TRANSACTION_MASK
    found: npt.NDArray[np.bool_] = (state == TRANSACTION_NONE) | (state == TRANSACTION_COMMIT)
    return found
