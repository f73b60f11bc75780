"""Benchmarks: ``python -m bench.NAME [--quick] [--json]``. With --json the last line printed is one JSON object."""
