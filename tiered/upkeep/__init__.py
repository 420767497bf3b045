"""Maintenance of a tier, as plans and their execution: gc, expire, rebuild, repair, truncate, doctor, status, roles."""
