"""What keeps a tier well, as plans and their execution: gc, expire, rebuild, repair, take-back, doctor, status, policies."""
