"""Measurements beside other systems, on the same GPU, in one go. `python -m benchmarks.compare --help`."""
