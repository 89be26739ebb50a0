"""A reward with something to learn for a model that knows nothing, for runs whose subject is not learning."""


def digits(completion: str, data: dict) -> dict[str, float]:
    """The share of digits, and a little for brevity."""
    share = sum(character.isdigit() for character in completion) / max(1, len(completion))
    return {"digits": share, "brevity": 0.1 / (1 + len(completion))}
