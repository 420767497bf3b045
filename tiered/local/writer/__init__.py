"""Writes message stores in the broker's own format, in this process, without a broker."""
