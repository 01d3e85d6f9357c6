"""A reward of one's own: part of the credit for part of the digits.

A recipe names it by import path (`digit_share.yaml`). relax calls it in its process pool, once for each trajectory, and gives it
the arguments it asks for by name: `response`, `reference`, `metadata`, `prompt`, `trajectory`.
"""


def digit_share(response: str, reference: str) -> float:
    """0 to 1: characters of `response` that stand where the reference has them, over the longer of the two lengths."""
    right = sum(given == expected for given, expected in zip(response, reference, strict=False))
    return right / max(len(response), len(reference), 1)
