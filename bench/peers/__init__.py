"""The systems that `bench/compare.py` measures, a module for each, and what they share."""
