"""The record: sequences, inbox, steps, the run directory. Imports no torch."""
