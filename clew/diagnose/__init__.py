"""Questions to a machine or a run."""
