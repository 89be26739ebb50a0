"""Inference engines behind one protocol: embedded, or over HTTP. Read `protocol.py` first."""
