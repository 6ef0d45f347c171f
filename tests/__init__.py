"""Tests, one folder a module of `src/megaspan`; run as `python -m pytest` from the repository."""
