"""Finds out why a distributed job has stopped: who waits for whom, and which rank or process is at fault."""
