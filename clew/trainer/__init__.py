"""The loop, and where its batches come from."""
