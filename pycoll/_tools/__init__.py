"""The command `pycoll`, benchmarks, tuning, and the pytest plugin."""
