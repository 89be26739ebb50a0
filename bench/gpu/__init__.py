"""`make gpu`: ten steps, their replay, and speed beside plain transformers, on one GPU."""
