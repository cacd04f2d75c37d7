"""The catalogue of findings: name, severity, why it matters, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["wrong", "fragile", "unusual", "slow"]


@dataclass(frozen=True)
class CatalogueEntry:
    """The fixed part of a finding.

    Attributes:
        condition: when a fragile module breaks, as a clause behind "if"; "" for all other severities.
    """

    severity: Severity
    why: str
    fix: str
    code: str
    condition: str = ""


FILL = "scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)"
"""The fill without another finding: -inf gives NaN in a row without visible keys, and -1e9 overflows in float16."""

CATALOGUE: dict[str, CatalogueEntry] = {
    # ------------------------------------------------------------ layout
    "heads-split-wrong": CatalogueEntry(
        "wrong",
        "view() alone splits memory in order, so a head gets pieces of several tokens instead of a piece of each "
        "token.",
        "Split the width into heads and head width, then move the head axis in front of the length.",
        "q = q.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]",
    ),
    "heads-merged-wrong": CatalogueEntry(
        "wrong",
        "The heads' outputs are joined in memory order, so one output row holds numbers of several tokens.",
        "Move the heads back behind the length before you join them.",
        "out = out.transpose(1, 2).reshape(B, T, H * D)",
    ),
    "heads-not-joined": CatalogueEntry(
        "wrong",
        "A sum or mean over heads loses which head computed what: the result is only as wide as one head.",
        "Concatenate the heads, then project.",
        "out = out.transpose(1, 2).reshape(B, T, H * D)",
    ),
    "heads-interleaved": CatalogueEntry(
        "unusual",
        "It trains, but weights cannot be exchanged with other implementations, which store the rows of a head "
        "side by side.",
        "Make the head the outer of the two axes.",
        "q = q.view(B, T, H, D)  # not (B, T, D, H)",
    ),
    "heads-not-split": CatalogueEntry(
        "wrong",
        "Each head attends in a pattern of its own: the number of heads is the number of patterns.",
        "Split queries, keys and values into heads before the product.",
        "q = q.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]",
    ),
    "heads-share-weights": CatalogueEntry(
        "wrong",
        "Each head should learn a pattern of its own; where heads use another head's weights, their own queries "
        "never learn.",
        "Multiply the values of each head by the weights of the same head.",
        "out = p @ v  # [B, H, T, T] @ [B, H, T, D]",
    ),
    "heads-dropped": CatalogueEntry(
        "wrong",
        "Queries, keys or values of a head that do not reach the output cannot learn; their width is wasted.",
        "Give each head its own keys and values, or project only those that heads share; then join all heads.",
        "out = out.transpose(1, 2).reshape(B, T, H * D)",
    ),
    "kv-heads-tiled": CatalogueEntry(
        "unusual",
        "In grouped-query attention, neighbouring query heads share a key head; published weights rely on that order.",
        "Repeat each key head, and each value head, for its group instead of tiling all of them.",
        "k = k.repeat_interleave(H // Hkv, dim=1)  # not k.repeat(1, H // Hkv, 1, 1)",
    ),
    "batches-mixed": CatalogueEntry(
        "wrong",
        "The output for one sequence depends on which other sequences are in its batch.",
        "Keep the batch a leading axis of every product; check for a view or transpose that mixes it with "
        "another axis.",
        "scores = q @ k.transpose(-2, -1)  # [B, H, T, T]: one matrix for each entry",
    ),
    "batch-and-length-swapped": CatalogueEntry(
        "wrong",
        "Tokens of different sequences attend to each other, and tokens of the same sequence do not.",
        "Set batch_first=True, or pass [T, B, E].",
        "nn.MultiheadAttention(E, H, batch_first=True)",
    ),
    "values-misplaced": CatalogueEntry(
        "wrong",
        "The weight of a key is applied to the value of another token.",
        "Split and order the values exactly like the keys.",
        "v = v.view(B, T, H, D).transpose(1, 2)  # as k",
    ),
    "keys-are-queries": CatalogueEntry(
        "wrong",
        "With one projection for both, the logits are symmetric, and a token attends most to tokens like itself.",
        "Give queries and keys separate projections.",
        "q, k = self.q(x), self.k(x)",
    ),
    "values-are-keys": CatalogueEntry(
        "wrong",
        "A token then passes on exactly the vector it is matched by.",
        "Project the values with weights of their own, unless all heads share one latent vector.",
        "v = self.v(x)",
    ),
    "values-not-projected": CatalogueEntry(
        "unusual",
        "Queries and keys are projected and values are not: each head passes on a slice of the input.",
        "Project the values, too.",
        "v = self.v(x)",
    ),
    "no-output-projection": CatalogueEntry(
        "unusual",
        "Without it the heads are concatenated but never mixed; in some libraries the next layer mixes them.",
        "Project the joined heads.",
        "return self.out(out.transpose(1, 2).reshape(B, T, H * D))",
    ),
    "layers-not-registered": CatalogueEntry(
        "wrong",
        "A plain list of layers is not part of the module: no optimiser trains them, and no state_dict() saves them.",
        "Hold layers in an nn.ModuleList, and parameters in an nn.ParameterList.",
        "self.heads = nn.ModuleList(Head(E, D) for _ in range(H))",
    ),
    "unused-parameter": CatalogueEntry(
        "wrong",
        "Weights that do not affect the output cannot learn: a step is skipped, or uses other weights.",
        "Use the parameter, or remove it.",
        "return self.out(heads)",
    ),
    "input-ignored": CatalogueEntry(
        "wrong",
        "Queries, keys or values are not computed from the input that the caller passed.",
        "Project each from its own input.",
        "q, k, v = self.q(query), self.k(key), self.v(value)",
    ),
    # ------------------------------------------------------------ softmax
    "softmax-over-queries": CatalogueEntry(
        "wrong",
        "The weights of a key sum to 1 over the queries, so a query's output is not an average of values.",
        "Take the softmax over the last axis, the keys.",
        "p = scores.softmax(dim=-1)  # [B, H, Q, K]",
    ),
    "softmax-over-heads": CatalogueEntry(
        "wrong",
        "The heads compete for each pair of tokens, so a query's output is not an average of values.",
        "Take the softmax over the last axis, the keys.",
        "p = scores.softmax(dim=-1)  # [B, H, Q, K]",
    ),
    "no-softmax": CatalogueEntry(
        "wrong",
        "Scores, a power, ReLU or sigmoid of them, or log_softmax do not sharpen as exp does, and some can be "
        "negative. Unless they are divided by their sum, outputs grow with the length.",
        "Turn scores into weights with a softmax.",
        "p = scores.softmax(dim=-1)",
    ),
    "softmax-twice": CatalogueEntry(
        "wrong",
        "The first softmax gives numbers between 0 and 1, whose exp lies between 1 and e: the second makes them "
        "nearly even, and masked keys become visible again.",
        "Take the softmax once; scaled_dot_product_attention already does.",
        "p = scores.softmax(dim=-1)",
    ),
    "scaled-after-softmax": CatalogueEntry(
        "wrong",
        "The scale belongs to the logits; applied to the weights, it makes them sum to something other than 1.",
        "Scale first, then take the softmax.",
        "p = (q @ k.transpose(-2, -1) * D**-0.5).softmax(dim=-1)",
    ),
    "rows-do-not-sum-to-one": CatalogueEntry(
        "wrong",
        "An output is an average of values only if the weights of a query sum to 1.",
        "After the softmax, change the weights by dropout only.",
        "p = scores.softmax(dim=-1)",
    ),
    "softmax-overflows": CatalogueEntry(
        "fragile",
        "exp of a large logit is infinite, and infinity / infinity is NaN: training fails at the first peaked head.",
        "Subtract the row's maximum first; torch.softmax does.",
        "p = torch.softmax(scores, dim=-1)",
        "a logit exceeds about 11 in float16, 88 in float32 or 709 in float64",
    ),
    "dropout-before-softmax": CatalogueEntry(
        "wrong",
        "A logit of 0 does not mask a key: the dropped key still gets a weight, and all other weights change with it.",
        "Apply dropout to the weights, not to the logits.",
        "p = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)",
    ),
    "dropout-not-rescaled": CatalogueEntry(
        "wrong",
        "In training, dropped weights are missing from the sums, so outputs in eval are larger than those the "
        "model was trained on.",
        "Divide the remaining weights by the share that remains, as F.dropout does.",
        "p = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)",
    ),
    "logits-changed": CatalogueEntry(
        "wrong",
        "A larger q·k should give a larger weight. Here some give a smaller one, q·k and −q·k give the same one, "
        "large ones all give the same one, or the logits of a query rescale each other.",
        "Between the product and the softmax, apply only a scale, a mask, a bias, or a cap that is odd, such as tanh.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5",
    ),
    # ------------------------------------------------------------ scale
    "scale-missing": CatalogueEntry(
        "wrong",
        "Dot products grow with the head width: the softmax saturates, and gradients vanish.",
        "Divide the scores by the square root of the head width.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5",
    ),
    "scale-without-root": CatalogueEntry(
        "wrong",
        "Divided by D instead of √D, the logits are too small, and all weights are nearly equal.",
        "Divide the scores by the square root of the head width.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)",
    ),
    "scaled-twice": CatalogueEntry(
        "wrong",
        "Two factors of 1/√D make 1/D: the logits are too small, and all weights are nearly equal.",
        "Scale in one place; scaled_dot_product_attention already does.",
        "out = F.scaled_dot_product_attention(q, k, v)  # q not scaled before",
    ),
    "scale-multiplied": CatalogueEntry(
        "wrong",
        "Multiplied instead of divided, the logits are so large that the softmax picks one key.",
        "Divide the scores by the square root of the head width.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)",
    ),
    "scale-of-length": CatalogueEntry(
        "wrong",
        "Divided by the square root of the length, the weights depend on how long the text is.",
        "Divide by the square root of the head width, the last axis of q.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))",
    ),
    "scale-sqrt-embed-dim": CatalogueEntry(
        "unusual",
        "Divided by the square root of the model width instead of the head width, logits are smaller by √H and "
        "weights flatter. Some tutorials do this.",
        "Divide by the square root of the head width, unless the weights were trained this way.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5  # D = E // H",
    ),
    "scale-unusual": CatalogueEntry(
        "unusual",
        "A scale other than 1/√D makes the weights sharper or flatter than usual.",
        "Pass scale= (--scale) if this is intended; otherwise divide by the square root of the head width.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5",
    ),
    "scale-not-uniform": CatalogueEntry(
        "unusual",
        "Heads, queries or keys with a factor of their own attend more or less sharply than others. It may be a "
        "learned temperature; where some factors are the usual one, the others lack the scale.",
        "Scale all logits by the same number, unless the factors are intended.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5",
    ),
    # ------------------------------------------------------------ masks
    "looks-into-the-future": CatalogueEntry(
        "wrong",
        "In training, the model copies the next token instead of predicting it; in use, that token does not exist yet.",
        "Mask every later key before the softmax.",
        "scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), torch.finfo(scores.dtype).min)",
    ),
    "sees-one-ahead": CatalogueEntry(
        "wrong",
        "Each token attends to the very token that it should predict.",
        "Start the mask at diagonal 1.",
        "hidden = torch.ones(T, T, dtype=torch.bool).triu(1)",
    ),
    "cannot-see-itself": CatalogueEntry(
        "wrong",
        "A token does not attend to itself; unless the first one may, it has no visible key, which gives NaN or an "
        "even average of the future.",
        "Start the mask at diagonal 1, not 0.",
        "hidden = torch.ones(T, T, dtype=torch.bool).triu(1)",
    ),
    "cannot-see-the-past": CatalogueEntry(
        "wrong",
        "A token that attends only to itself, or misses earlier tokens, cannot use what came before.",
        "Leave every key up to the query's own position visible.",
        "visible = torch.ones(T, T, dtype=torch.bool).tril()",
    ),
    "mask-inverted": CatalogueEntry(
        "wrong",
        "Keys that should be masked are visible, and keys that should be visible are masked. SDPA: True = "
        "attend; nn.MultiheadAttention: True = masked.",
        "Invert the mask where it is applied.",
        FILL,
    ),
    "mask-after-softmax": CatalogueEntry(
        "wrong",
        "Masked keys take their share of the softmax before it is discarded, so weights sum to less than 1.",
        "Mask keys before the softmax.",
        "p = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(dim=-1)",
    ),
    "mask-fill-too-small": CatalogueEntry(
        "wrong",
        "A masked key whose logit is an ordinary number gets an ordinary weight.",
        "Fill with the lowest number of the dtype, not with 0 or a small number.",
        FILL,
    ),
    "bool-mask-added": CatalogueEntry(
        "wrong",
        "Added as a number, True raises a logit by 1 and hides nothing.",
        "Use masked_fill for a boolean mask; add only masks that hold 0 and the lowest number of the dtype.",
        FILL,
    ),
    "mask-on-some-heads": CatalogueEntry(
        "wrong",
        "The other heads attend to masked keys.",
        "Give the mask an axis for the heads, so that it applies to all of them.",
        "mask = mask[:, None]  # [B, 1, Q, K]",
    ),
    "mask-on-some-batches": CatalogueEntry(
        "wrong",
        "The other batch entries attend to masked keys.",
        "Give each batch entry its own mask.",
        "mask = padding[:, None, None, :]  # [B, 1, 1, K]",
    ),
    "mask-on-queries": CatalogueEntry(
        "wrong",
        "The rows of padding are masked instead of its columns: real tokens still attend to padding.",
        "Apply a padding mask to the last axis, the keys.",
        "mask = padding[:, None, None, :]  # [B, 1, 1, K]",
    ),
    "mask-ignored": CatalogueEntry(
        "wrong",
        "The mask is accepted but has no effect.",
        "Apply it before the softmax.",
        FILL,
    ),
    "mask-applied-wrong": CatalogueEntry(
        "wrong",
        "Other keys are masked than the mask specifies, or the code path for a mask computes something else.",
        "Bring the mask to [B, 1, Q, K] before you apply it, and compute the rest as without one.",
        FILL,
    ),
    "nan-on-empty-row": CatalogueEntry(
        "fragile",
        "One NaN spreads to the whole model in the next layer, and to all weights in the backward pass.",
        "Fill with the lowest number of the dtype instead of -inf, or set the weights of such a row to 0.",
        FILL,
        "a mask hides every key of a query, as in an entry that is all padding",
    ),
    "returned-weights-differ": CatalogueEntry(
        "wrong",
        "The returned weights are not the weights that were used.",
        "Return the weights after mask and softmax, of the same heads in the same order.",
        "return out, p",
    ),
    # ------------------------------------------------------------ state and range
    "not-finite": CatalogueEntry(
        "wrong",
        "NaN or infinity in the output for ordinary inputs spreads to everything after it.",
        "Check for a division by zero, a logarithm of zero, or uninitialised weights.",
        "torch.isfinite(out).all()",
    ),
    "dropout-in-eval": CatalogueEntry(
        "wrong",
        "After .eval(), the same input gives a different output each time.",
        "Tie dropout to self.training.",
        "p = F.dropout(p, self.dropout, training=self.training)",
    ),
    "training-differs": CatalogueEntry(
        "unusual",
        "Training optimises a function that eval does not compute. Only dropout should differ between the two.",
        "Compute scores and weights the same way in training and in eval.",
        "p = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)",
    ),
    "state-between-calls": CatalogueEntry(
        "wrong",
        "The output depends on earlier calls of the module.",
        "Store nothing of a call in the module; pass caches in and return them.",
        "out, cache = attention(x, cache=cache)",
    ),
    "input-modified": CatalogueEntry(
        "wrong",
        "The caller's tensor changes: a residual connection adds the wrong numbers, and the backward pass fails.",
        "Do not write to an input in place.",
        "x = x * scale  # not x *= scale",
    ),
    "gradient-blocked": CatalogueEntry(
        "wrong",
        "Weights that affect the output get no gradient, so they never learn.",
        "Check for detach(), .data, torch.no_grad() or numpy between them and the output.",
        "p = scores.softmax(dim=-1)  # without .detach()",
    ),
    "fp16-overflow": CatalogueEntry(
        "fragile",
        "float16 ends at 65,504; the same input works in bfloat16.",
        "Fill masked scores with the lowest number of their own dtype.",
        FILL,
        "the module runs in float16, by .half() or autocast",
    ),
    "decoding-differs": CatalogueEntry(
        "wrong",
        "Text generated token by token comes from another function than the one that was trained.",
        "Append new keys and values at the end, and let the last query attend to all of them (a bottom-right mask).",
        "k = torch.cat([past_k, k], dim=-2)",
    ),
    "fails-on-batch-of-one": CatalogueEntry(
        "wrong",
        "The last batch of an epoch, or a single request, fails or gives a different result.",
        "Name the axes that you squeeze.",
        "x.squeeze(1)  # not x.squeeze()",
    ),
    "batch-variant": CatalogueEntry(
        "wrong",
        "The same text gives other last bits in a batch of another size, so training and serving, or two runs, "
        "disagree.",
        "Use products whose order of summation does not depend on the number of rows.",
        "headscope.MultiHeadAttention(embed_dim, num_heads, reproducible=True)",
    ),
    "place-variant": CatalogueEntry(
        "wrong",
        "The same text gives other last bits at another position in the batch.",
        "Treat all entries alike: no separate path for leftover rows or for the first entry.",
        "headscope.MultiHeadAttention(embed_dim, num_heads, reproducible=True)",
    ),
    "not-permutation-equivariant": CatalogueEntry(
        "unusual",
        "Without positions, reordering the tokens should only reorder the outputs; here something mixes positions.",
        "If the module uses positions, ignore this; otherwise check how heads are split and joined.",
        "q = q.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]",
    ),
    # ------------------------------------------------------------ speed
    "weights-discarded": CatalogueEntry(
        "slow",
        "need_weights keeps torch from its fused kernels, and the averaged weights are discarded.",
        "Do not request the weights.",
        "out, _ = self.attention(x, x, x, need_weights=False)",
    ),
    "quadratic-memory": CatalogueEntry(
        "slow",
        "The weights of all pairs are written to memory and read again; a fused kernel stores none.",
        "Use a fused kernel.",
        "out = headscope.attention(q, k, v)  # or F.scaled_dot_product_attention",
    ),
}

OVERFLOWING_SCORES = (
    "Scale before the product, and subtract the row's maximum before exp, as torch.softmax does.",
    "scores = (q * D**-0.5) @ k.transpose(-2, -1)",
)
"""The remedy of ``fp16-overflow`` where scores overflow, not the number that fills masked ones."""
