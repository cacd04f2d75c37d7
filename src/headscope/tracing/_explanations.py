"""The texts of a trace: why each step exists, its common mistake, and the format of sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """Why a step exists, and its common mistake."""

    why: str
    mistake: str


LETTERS = {
    "B": "batch",
    "Q": "queries",
    "K": "keys",
    "E": "model width",
    "K+1": "keys, and the one of bias_kv",
    "kdim": "width the keys are projected from",
    "H": "heads",
    "Hkv": "key/value heads",
    "D": "head width",
    "Dv": "head width of the values",
}

EXPLANATIONS: dict[str, Explanation] = {
    "input": Explanation(
        "One vector of width E for each position. Attention is where positions exchange information; the other "
        "layers of a transformer process each position by itself.",
        "Passing token ids instead of vectors (an embedding comes first), or [length, batch, E]: here the batch is "
        "the first axis; in nn.MultiheadAttention it is the second unless batch_first=True.",
    ),
    "context": Explanation(
        "Cross-attention: the queries come from x, the keys and values from another sequence, as when a decoder "
        "reads what an encoder wrote.",
        "Swapping the two. The output has one position for each query, so it is as long as x, never as the context.",
    ),
    "queries": Explanation(
        "A query is what a position looks for. W_q is learned separately from W_k, so what a position looks "
        "for can differ from what it offers.",
        "Multiplying by W instead of Wᵀ: nn.Linear stores its weight as [out, in]. For a square W the shape is "
        "right either way.",
    ),
    "keys": Explanation(
        "A key is what a position is matched by: the dot product measures how well query i matches key j.",
        "Using one matrix for queries and keys: i then matches j exactly as well as j matches i, and most positions "
        "match themselves best.",
    ),
    "values": Explanation(
        "A value is what a position passes on when a query matches its key. The two are separate, like a book's text "
        "and its catalogue card.",
        "Averaging x, or the keys, instead of the values: the shapes agree, so nothing fails.",
    ),
    "split queries": Explanation(
        "The width is split into H pieces of D, so that H heads can look for different things at the cost of one wide "
        "head. The head axis moves in front of the positions: matrix products then stay within a head.",
        "view(B, H, Q, D) without the transpose. The shape is right, the numbers are not: each “head” then holds "
        "a run of positions instead of a piece of every position.",
    ),
    "split keys": Explanation(
        "Keys are split exactly like queries, so that head h of the queries is compared with head h of the keys.",
        "Splitting as view(B, K, D, H): the rows of W are ordered head by head, so each head's D columns lie together.",
    ),
    "split values": Explanation(
        "Each head mixes only its own piece of the values, and so contributes its own part of the result.",
        "Folding heads into the batch, view(B * H, K, D), right after the projection: transpose(1, 2) comes first.",
    ),
    "normalise queries": Explanation(
        "A norm fixes the length of each query before the learned gain. Scores then depend on directions, and cannot "
        "grow without bound in training, which would put all weight on one key.",
        "Normalising after the rotation: the gain differs from component to component, and would no longer act on the "
        "components for which it was trained.",
    ),
    "normalise keys": Explanation(
        "The keys have a norm of their own, with their own gain, so a long key does not attract every query.",
        "One gain for queries and keys: q_norm and k_norm are separate parameters. Another: the norm over the whole "
        "width, all heads together, where the model has it for each head (or the reverse).",
    ),
    "rotate queries": Explanation(
        "Attention itself ignores the order of positions. Rotary turns each pair of components by an angle that is "
        "proportional to the position. The dot product of two rotated vectors depends only on the distance i − j.",
        "Pairing the wrong components: n with n + D/2 (Hugging Face), or 2n with 2n + 1 (the paper, Llama's own "
        "weights). The shapes agree, and a model with loaded weights gives nonsense.",
    ),
    "rotate keys": Explanation(
        "Keys turn by the same angles as queries, each at its own position. A cache stores rotated keys, so each key "
        "is rotated once.",
        "Rotating the values, too, or starting again at position 0 in each decoding step: the position of a new token "
        "is the number of tokens before it.",
    ),
    "share keys": Explanation(
        "There are fewer key heads than query heads: each key head serves a group of H / Hkv query heads, and the "
        "cache of keys is smaller by that factor.",
        "repeat instead of repeat_interleave: head h would then use key head h mod Hkv instead of ⌊h · Hkv / H⌋, "
        "for which the weights were trained.",
    ),
    "share values": Explanation(
        "The values are shared by the same groups as the keys.",
        "Sharing keys and values in different orders: the weights of one key head would apply to another's values.",
    ),
    "scores": Explanation(
        "The dot product of a query with a key measures how well they match. It sums D products, so its spread grows "
        "as √D; dividing by √D keeps the softmax from putting all its weight on one key before training.",
        "Dividing by √E (√embed_dim) instead of √D (√head_dim): with H heads the scores are √H times too small and "
        "the weights too even. The shapes do not reveal it.",
    ),
    "softcap": Explanation(
        "tanh keeps every score between −c and c, without a hard edge where the gradient would vanish, so no single "
        "match can dominate.",
        "Capping after the mask: −∞ would become −c, and masked keys would get weight.",
    ),
    "position bias": Explanation(
        "A number for each distance and head is added to the score, so near keys can weigh more than far ones. ALiBi "
        "has a fixed slope for each head; T5 learns a table of buckets, which get wider with the distance.",
        "Swapping i and j: ALiBi does not change, but T5's bidirectional buckets have separate halves for keys before "
        "and after the query. T5 has no factor 1 / √D either, so its modules need scale=1.",
    ),
    "bias": Explanation(
        "A number added to each score, often a function of the distance between i and j (ALiBi, T5, relative "
        "positions): attention itself ignores the order of positions.",
        "Adding it before the scale, which would scale it too; or passing a boolean mask as bias, which only adds 0 "
        "or 1.",
    ),
    "mask": Explanation(
        "exp(−∞) = 0: a masked key gets a weight of exactly 0, and its share goes to the others. A causal mask hides "
        "the future; without it, a model in training could read the answer that it should predict.",
        "Polarity: here and in scaled_dot_product_attention True = attend; in nn.MultiheadAttention True = masked. "
        "Masking after the softmax: the remaining weights no longer sum to 1.",
    ),
    "bias key": Explanation(
        "Each head has a learned key that belongs to no token. A query that finds nothing among the tokens can give "
        "its weight to this key, so the matrix has one more column.",
        "Forgetting to extend the mask by one column: a row that masks every token must still attend to this key, and "
        "a causal mask aligned to the last column would be off by one.",
    ),
    "weights": Explanation(
        "Softmax turns the scores of each query into shares that are at least 0 and sum to 1. Pictures of attention "
        "show this matrix: row = query, column = key.",
        "Softmax over the wrong axis. It runs over the keys, dim=-1; dim=1, right for a single [Q, K] matrix, is the "
        "head axis of [B, H, Q, K], and the shape is the same.",
    ),
    "bias value": Explanation(
        "The learned value of that key: what a head passes on where no token matches. It is appended last, like the "
        "key.",
        "Appending a key without a value, as a sink: the weight of a sink passes nothing on, that of bias_kv passes on "
        "bias_v.",
    ),
    "head outputs": Explanation(
        "In each head, a query's output is the average of the values, weighted by its row of weights.",
        "Multiplying the weights by the keys instead of the values, or pᵀ v: in self-attention both have the right "
        "shape.",
    ),
    "concatenation": Explanation(
        "The heads are put side by side again, so that each position has one vector. This is the inverse of the "
        "split: transpose back, then join.",
        "reshape(B, Q, H * D) without transposing back: the shape is right, but positions and heads are mixed. After "
        "the transpose, view fails because memory is not contiguous; .contiguous().view(…) or .reshape(…) copies.",
    ),
    "gate": Explanation(
        "A number between 0 and 1 for each output component of each head, computed from x. A head can switch itself "
        "off for a token, instead of attending to some key that means nothing.",
        "Computing the gate from the heads' outputs: it reads x, the input of the layer. Or a gate without the "
        "sigmoid.",
    ),
    "gated outputs": Explanation(
        "The gate multiplies the outputs elementwise, before W_o mixes the heads.",
        "Gating after the output projection: W_o has then mixed the heads, so no head can be closed separately.",
    ),
    "output": Explanation(
        "W_o mixes the outputs of the heads. Without it, each head would write only to its own D output columns.",
        "Leaving it out: the shape is already right after the concatenation, so nothing fails.",
    ),
}

_DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_POWERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def subscript(number: int) -> str:
    """Return a number in subscript: 8 -> ₈"""
    return str(number).translate(_DIGITS)


def quantity(number: int) -> str:
    """Return a number for display: 25600 -> 25,600; 8000000000000 -> 8 × 10¹²"""
    if number < 10**9:
        return f"{number:,}"
    mantissa, power = f"{number:.2e}".split("e")
    return f"{float(mantissa):g} × 10{str(int(power)).translate(_POWERS)}"


def memory(size: int) -> str:
    """Return a size in bytes for display: 102400 -> 100 KiB"""
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if amount < 999.5 or unit == "EiB":
            break
        amount /= 1024
    return f"{amount:.3g} {unit}"
