"""The gateway between agents and inference engines: OpenAI's and Anthropic's interfaces in, exact tokens out."""
