"""The order in which a broker writes a message's properties: that of its hash table.

A broker reads the properties of a message into a table of 128 places, adds its own, and writes them down as the table
has them. No reader may rely on it; who compares bytes, or makes records that a broker makes, follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiered.format.properties import java_hash

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACES: Final = 128
_INT: Final = 0xFFFF_FFFF


def broker_order(properties: Mapping[str, str]) -> dict[str, str]:
    """The same properties in a broker's order; those that fall on one place stay as they were given."""
    places = _PLACES
    while 4 * len(properties) > 3 * places:  # the table grows when it is three quarters full
        places *= 2

    def place(name: str) -> int:
        found = java_hash(name) & _INT
        return (found ^ found >> 16) & (places - 1)

    return {name: properties[name] for name in sorted(properties, key=place)}
