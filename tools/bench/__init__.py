"""What `tools/bench_spill.py` measures, one noun a file. Nothing here is imported by the package."""
