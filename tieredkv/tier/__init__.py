"""Where a part lies: memory and disk as slots of a byte budget, with reads, writes and syncs in batches."""
