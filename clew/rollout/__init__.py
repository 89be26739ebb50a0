"""Workflows, rewards and the admission of groups. Read `runner.py` first: the loop that makes groups."""
