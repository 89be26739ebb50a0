"""Starting and supervising processes, and the checks before. Read `supervisor.py` first."""
