"""Finds out why a distributed job has stopped, and which rank or process is at fault. Read `judge.py` first."""
