"""KV bytes on their way through memory: pages, tables, tails, records and the store."""
