"""The reward of the addition example."""


def exact_match(completion: str, data: dict) -> float:
    """1 when the whole answer is right."""
    return float(completion == data["answer"])
