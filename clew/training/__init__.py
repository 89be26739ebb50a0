"""Training: a step and its engine, the policy, sharding, checkpoints and export. Read `engine.py` first."""
