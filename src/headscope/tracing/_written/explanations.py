"""Why each step of a module that is not headscope's exists, and its common mistake."""

from __future__ import annotations

from headscope.tracing._explanations import EXPLANATIONS, Explanation

_MORE: dict[str, Explanation] = {
    "queries, keys, values": Explanation(
        "One matrix product computes queries, keys and values together; its result is cut into three parts.",
        "Cutting the parts in another order than that in which the weights were trained: the shapes agree.",
    ),
    "keys, values": Explanation(
        "One matrix product computes keys and values together; its result is cut into two parts.",
        "Exchanging the two parts: the shapes agree, so nothing fails.",
    ),
    "change queries": Explanation(
        "The code changes the queries before they are compared: it normalises them, or turns them by their position "
        "(rotary embedding).",
        "Changing the queries but not the keys, or after the heads were joined instead of in each head.",
    ),
    "change keys": Explanation(
        "The keys are changed like the queries, so that both are compared on the same terms.",
        "Turning the keys of a cache a second time: their positions do not change.",
    ),
    "scale": Explanation(
        "A dot product sums D products, so its spread grows as √D. Dividing by √D keeps the softmax from putting all "
        "its weight on one key before training.",
        "Dividing by √embed_dim instead of √head_dim, scaling twice, or not at all. The shapes do not reveal it.",
    ),
    "dropout": Explanation(
        "In training, dropout sets random weights to 0 and enlarges the others, so that no head relies on one key.",
        "Leaving it on in eval: the same input then gives another output each time.",
    ),
    "mask after the softmax": Explanation(
        "Weights of hidden pairs are set to 0 after the softmax. That is right for rows in which everything is hidden.",
        "Masking only here: the remaining weights of a row no longer sum to 1.",
    ),
    "scale after the softmax": Explanation(
        "The weights are multiplied by a number after the softmax.",
        "The scale belongs before the softmax: after it, the weights of a row no longer sum to 1.",
    ),
}


def explain_step(step: str) -> Explanation:
    """Return the explanation of a step; a number at its end does not count."""
    name = step.rstrip("0123456789 ")
    return _MORE.get(name) or EXPLANATIONS[name]
