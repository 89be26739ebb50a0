"""The training loop, and the sources of its batches. Read `loop.py` first."""
