"""`clew agent stress`: loads an agent as training will, before training, and reports the problems that this causes."""
