"""What keeps a tier well, as plans and their execution: gc, expire, rebuild, repair, truncate, doctor, status, roles."""
