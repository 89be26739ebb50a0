"""Models, tokenizers and processors: loaded and checked. Read `loading.py` first."""
