"""Workflows, rewards and the admission of groups."""
