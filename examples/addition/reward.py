"""The reward of the addition example."""


def exact_match(completion: str, data: dict) -> float:
    """Return 1.0 if the completion is exactly the right answer, and 0.0 otherwise."""
    return float(completion == data["answer"])
