"""`clew agent stress`: what training will do to an agent, done to it beforehand, and what came of it."""
