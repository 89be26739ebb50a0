"""Starting and supervising processes, and the checks before."""
