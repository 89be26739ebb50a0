"""`make gpu`: ten steps, their replay, and speed beside plain transformers, vLLM and SGLang, on one GPU."""
