"""`clew agent stress`: loads an agent as training will, and reports the problems. Read `run.py` first."""
