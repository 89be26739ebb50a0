"""Advantages, losses and the engine that trains."""
