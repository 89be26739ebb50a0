"""Displays a run to people: its progress, its status, and what its record holds. Read `show.py` first."""
