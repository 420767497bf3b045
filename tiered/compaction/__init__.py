"""Key compaction: of each key the newest value. Pure; ``docs/compaction.md`` says what it does and when."""
