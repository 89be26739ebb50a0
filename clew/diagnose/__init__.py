"""Diagnosis of a machine or a run: code behind doctor, replay, diff, blame, agent and eval."""
