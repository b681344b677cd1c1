"""Parts of the crash-recovery replay tool; `tools/replay.py` runs them."""
