"""The texts of a trace: why each step exists, the common mistake at it, and how sizes are written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """Why a step exists, and the common mistake at it."""

    why: str
    mistake: str


LETTERS = {
    "B": "batch",
    "Q": "queries",
    "K": "keys",
    "E": "model width",
    "kdim": "width the keys are projected from",
    "H": "heads",
    "Hkv": "key/value heads",
    "D": "head width",
    "Dv": "head width of the values",
}

EXPLANATIONS: dict[str, Explanation] = {
    "input": Explanation(
        "One vector of width E for each position. Attention is where positions exchange information: the other "
        "layers of a transformer treat each position by itself.",
        "Passing token numbers instead of vectors (an embedding comes first), or [length, batch, E]: here the batch "
        "is the first axis, in nn.MultiheadAttention it is the second unless batch_first=True.",
    ),
    "context": Explanation(
        "Cross-attention: the queries come from x, the keys and values from another sequence, as when a decoder "
        "reads what an encoder wrote.",
        "Swapping the two. The output has one position for each query, so its length is that of x, never that of "
        "the context.",
    ),
    "queries": Explanation(
        "A query is what a position is looking for. W_q is learned, and apart from W_k, so that what a position "
        "looks for need not be what it offers.",
        "Multiplying by W instead of Wᵀ: nn.Linear keeps its weight as [out, in]. For a square W the shape comes "
        "out right all the same.",
    ),
    "keys": Explanation(
        "A key is what a position can be found by. How well query i matches key j is their dot product.",
        "Using one matrix for queries and keys: i then matches j exactly as much as j matches i, and most positions "
        "match themselves best.",
    ),
    "values": Explanation(
        "A value is what a position hands over when it is found. It is apart from the key, as a book's text is from "
        "its catalogue card.",
        "Averaging x, or the keys, instead of the values: the shapes agree, so that nothing complains.",
    ),
    "split queries": Explanation(
        "The width is cut into H pieces of D, so that H heads can look for different things at the cost of one wide "
        "head. The axis of heads moves in front of the positions: matrix products then stay within a head.",
        "view(B, H, Q, D) without the transpose. The shape is right and the numbers are not: each “head” then holds "
        "a run of positions instead of a piece of every position.",
    ),
    "split keys": Explanation(
        "Keys are cut exactly as queries are, so that head h of the queries meets head h of the keys.",
        "Cutting as view(B, K, D, H): the rows of W are ordered head by head, so each head's D columns lie together.",
    ),
    "split values": Explanation(
        "Each head will mix only its own piece of the values, and so contributes its own part of the result.",
        "Folding heads into the batch, view(B * H, K, D), straight after the projection: transpose(1, 2) comes first.",
    ),
    "share keys": Explanation(
        "There are fewer key heads than query heads: each key head serves a group of H / Hkv query heads, and the "
        "cache of keys is smaller by that factor.",
        "repeat instead of repeat_interleave: head h would then use key head h mod Hkv, not ⌊h · Hkv / H⌋, for "
        "which the weights were trained.",
    ),
    "share values": Explanation(
        "The values are shared by the same groups as the keys.",
        "Sharing the keys and the values in different orders: each head would then weigh by one and hand over another.",
    ),
    "scores": Explanation(
        "The dot product of a query with a key measures how well they match. It sums D products, so its spread grows "
        "as √D; dividing by √D keeps the softmax from putting all its weight on one key before anything was learned.",
        "Dividing by √E (√embed_dim) instead of √D (√head_dim): with H heads the scores are √H times too small and "
        "the weights too even. The shapes cannot show it.",
    ),
    "softcap": Explanation(
        "tanh keeps every score between −c and c, without a hard edge at which the gradient would stop: no single "
        "match can take over.",
        "Capping after the mask: −∞ would become −c, and what is hidden would get weight.",
    ),
    "bias": Explanation(
        "A number added to each score, often from how far apart i and j are (ALiBi, T5, relative positions): "
        "attention itself does not see the order of the positions.",
        "Adding it before the scale, which would scale it too; or passing a boolean mask as bias, which only adds 0 "
        "or 1.",
    ),
    "mask": Explanation(
        "exp(−∞) = 0: a hidden key gets exactly no weight and its share goes to the others. A causal mask hides the "
        "future; without it a model in training could read the answer it is to predict.",
        "Polarity: here and in scaled_dot_product_attention True = may be seen; in nn.MultiheadAttention True = "
        "hidden. Masking after the softmax: what is left no longer sums to one.",
    ),
    "weights": Explanation(
        "Softmax turns the scores of each query into shares: none negative, together one. This matrix is what "
        "pictures of attention show: row = query, column = key.",
        "Softmax over the wrong axis. It runs over the keys, dim=-1; dim=1, right for a single [Q, K] matrix, means "
        "the heads once there are four axes, and the shape is the same.",
    ),
    "head outputs": Explanation(
        "Each query's output in a head is the average of the values, weighted by its row of weights.",
        "Multiplying the weights with the keys instead of the values, or pᵀ v: in self-attention both have the "
        "right shape.",
    ),
    "concatenation": Explanation(
        "The heads are laid side by side again, so that each position has one vector. It is the inverse of the "
        "split: transpose back, then join.",
        "reshape(B, Q, H * D) without transposing back: right shape, positions and heads mixed. After the "
        "transpose, view fails because memory is no longer contiguous; .contiguous().view(…) or .reshape(…) copies.",
    ),
    "output": Explanation(
        "W_o mixes what the heads found. Without it each head could write only to its own D columns of the result.",
        "Leaving it out: the shape is right already after the concatenation, so nothing complains.",
    ),
}

_DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_POWERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def subscript(number: int) -> str:
    """8 -> ₈"""
    return str(number).translate(_DIGITS)


def quantity(number: int) -> str:
    """25600 -> 25,600; 8000000000000 -> 8 × 10¹²"""
    if number < 10**9:
        return f"{number:,}"
    mantissa, power = f"{number:.2e}".split("e")
    return f"{float(mantissa):g} × 10{str(int(power)).translate(_POWERS)}"


def memory(size: int) -> str:
    """102400 -> 100 KiB"""
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if amount < 999.5 or unit == "EiB":
            break
        amount /= 1024
    return f"{amount:.3g} {unit}"
