"""Pages in a browser that show a tier: brokers, queues, messages, timers, archive, costs. Read-only, by plain HTML."""
