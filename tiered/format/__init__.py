"""Bytes to records and back. Pure: no I/O, no clock."""
