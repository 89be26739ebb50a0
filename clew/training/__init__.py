"""Training: advantages, losses, the engine that makes the steps, sharding, checkpoints and export."""
