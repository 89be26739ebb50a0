"""Placing processes; nothing else."""
