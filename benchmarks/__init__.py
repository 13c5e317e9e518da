"""Benchmarks of onepass, which are run from a checkout: ``python -m benchmarks --help``. They are not in the wheel."""
