"""The gateway: OpenAI's and Anthropic's interfaces in, exact tokens out. Read `app.py` first, then `turns.py`."""
