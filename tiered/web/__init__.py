"""Read-only web pages that show a tier: brokers, queues, messages, timers, archive, costs. Plain HTML."""
