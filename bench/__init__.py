"""Benchmarks, and the chaos that a run must survive."""
