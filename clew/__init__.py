"""Clew: asynchronous reinforcement learning for LLM agents; every step leaves a thread back to its cause."""
