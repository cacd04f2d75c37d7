"""The catalogue of findings: the name of each, how bad it is, why it matters, and how to correct it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["wrong", "unusual", "slow"]


@dataclass(frozen=True)
class CatalogueEntry:
    """The fixed part of a finding."""

    severity: Severity
    why: str
    fix: str
    code: str


CATALOGUE: dict[str, CatalogueEntry] = {
    # ------------------------------------------------------------ layout
    "heads-split-wrong": CatalogueEntry(
        "wrong",
        "view alone cuts the memory in order, so that a head gets pieces of several tokens instead of a piece of each.",
        "Cut the width into heads and heads' width, then move the heads in front of the length.",
        "q = q.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]",
    ),
    "heads-merged-wrong": CatalogueEntry(
        "wrong",
        "The heads' results are joined in the order of memory: an output row holds numbers of several tokens.",
        "Move the heads back behind the length before joining them.",
        "out = out.transpose(1, 2).reshape(B, T, H * D)",
    ),
    "heads-not-joined": CatalogueEntry(
        "wrong",
        "A sum or mean of heads loses which head gave what: together they hold no more than one head's width.",
        "Put the heads side by side, then project.",
        "out = out.transpose(1, 2).reshape(B, T, H * D)",
    ),
    "heads-interleaved": CatalogueEntry(
        "unusual",
        "It trains, but weights from or for another implementation do not fit: there a head's rows lie side by side.",
        "Make the head the outer of the two axes.",
        "q = q.view(B, T, H, D)  # not (B, T, D, H)",
    ),
    "heads-not-split": CatalogueEntry(
        "wrong",
        "Heads are meant to attend to different things; a single one of the whole width makes one pattern.",
        "Split queries, keys and values into heads before the product.",
        "q = q.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]",
    ),
    "heads-share-weights": CatalogueEntry(
        "wrong",
        "Each head learns a pattern of its own; heads that use another head's weights have queries that never learn.",
        "Multiply the values of each head by the weights of the same head.",
        "out = p @ v  # [B, H, T, T] @ [B, H, T, D]",
    ),
    "heads-dropped": CatalogueEntry(
        "wrong",
        "Queries, keys or values of a head that do not reach the output cannot learn; their width is lost.",
        "Give each head its own keys and values, or project only those that heads share; join all heads.",
        "out = out.transpose(1, 2).reshape(B, T, H * D)",
    ),
    "kv-heads-tiled": CatalogueEntry(
        "unusual",
        "Grouped-query attention gives neighbouring query heads one key head; published weights rely on it.",
        "Repeat each key head, and each value head, for its group instead of tiling all of them.",
        "k = k.repeat_interleave(H // Hkv, dim=1)  # not k.repeat(1, H // Hkv, 1, 1)",
    ),
    "batches-mixed": CatalogueEntry(
        "wrong",
        "The output for one sequence depends on which others are in its batch.",
        "Keep the batch a leading axis of every product; look for a view or transpose that mixes it with another axis.",
        "scores = q @ k.transpose(-2, -1)  # [B, H, T, T]: one matrix for each entry",
    ),
    "batch-and-length-swapped": CatalogueEntry(
        "wrong",
        "Tokens of different sequences attend to each other, and those of one sequence do not.",
        "Specify that the batch comes first, or hand over [T, B, E].",
        "nn.MultiheadAttention(E, H, batch_first=True)",
    ),
    "values-misplaced": CatalogueEntry(
        "wrong",
        "The weight of a key is given to the value of another token.",
        "Values need the same split and order as keys.",
        "v = v.view(B, T, H, D).transpose(1, 2)  # as k",
    ),
    "keys-are-queries": CatalogueEntry(
        "wrong",
        "With one projection for both, a token attends most to what is like itself, and the logits are symmetric.",
        "Give queries and keys projections of their own.",
        "q, k = self.q(x), self.k(x)",
    ),
    "values-are-keys": CatalogueEntry(
        "wrong",
        "What a token offers is then what it is found by; one of the projections is not used.",
        "Project the values by weights of their own.",
        "v = self.v(x)",
    ),
    "values-not-projected": CatalogueEntry(
        "unusual",
        "Queries and keys are projected and values are not: what a token gives is cut out of what it is.",
        "Project the values, too.",
        "v = self.v(x)",
    ),
    "no-output-projection": CatalogueEntry(
        "unusual",
        "Without it the heads are side by side and never mixed; in some libraries the next layer does it.",
        "Project the joined heads.",
        "return self.out(out.transpose(1, 2).reshape(B, T, H * D))",
    ),
    "unused-parameter": CatalogueEntry(
        "wrong",
        "Weights that change nothing cannot learn: some step is skipped, or uses another's weights.",
        "Use it, or take it away.",
        "return self.out(heads)",
    ),
    "input-ignored": CatalogueEntry(
        "wrong",
        "Keys, values or queries are taken from another input than the caller gave.",
        "Project each from its own input.",
        "q, k, v = self.q(query), self.k(key), self.v(value)",
    ),
    # ------------------------------------------------------------ softmax
    "softmax-over-queries": CatalogueEntry(
        "wrong",
        "The weights of a key sum to one over the queries; a query's output is no average of values.",
        "Take the softmax over the last axis, the keys.",
        "p = scores.softmax(dim=-1)  # [B, H, Q, K]",
    ),
    "softmax-over-heads": CatalogueEntry(
        "wrong",
        "The heads compete for each pair of tokens; a query's output is no average of values.",
        "Take the softmax over the last axis, the keys.",
        "p = scores.softmax(dim=-1)  # [B, H, Q, K]",
    ),
    "no-softmax": CatalogueEntry(
        "wrong",
        "Scores, a power, ReLU or sigmoid of them, or log_softmax, do not sharpen as exp does. They may be negative; "
        "where they are not divided by their sum, outputs grow with the length.",
        "Turn scores into weights by a softmax.",
        "p = scores.softmax(dim=-1)",
    ),
    "softmax-twice": CatalogueEntry(
        "wrong",
        "Weights lie between 0 and 1, their exp between 1 and e: nearly even, and a key that was hidden is seen again.",
        "Take the softmax once; scaled_dot_product_attention already does.",
        "p = scores.softmax(dim=-1)",
    ),
    "scaled-after-softmax": CatalogueEntry(
        "wrong",
        "The scale belongs to the logits; here it makes the weights sum to something else than one.",
        "Scale first, then take the softmax.",
        "p = (q @ k.transpose(-2, -1) * D**-0.5).softmax(dim=-1)",
    ),
    "rows-do-not-sum-to-one": CatalogueEntry(
        "wrong",
        "An output is an average of values only if the weights of a query sum to one.",
        "Do nothing to the weights after the softmax but dropout.",
        "p = scores.softmax(dim=-1)",
    ),
    "softmax-overflows": CatalogueEntry(
        "wrong",
        "exp of a large logit is infinite, and infinity over infinity is NaN: training dies at the first peaked head.",
        "Subtract the row's maximum first; torch.softmax does.",
        "p = torch.softmax(scores, dim=-1)",
    ),
    "dropout-before-softmax": CatalogueEntry(
        "wrong",
        "A dropped logit of 0 is no hidden key: it gets a weight of its own, and all others change with it.",
        "Drop weights, not logits.",
        "p = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)",
    ),
    "dropout-not-rescaled": CatalogueEntry(
        "wrong",
        "Dropped weights are missing from the sums in training: outputs in eval are larger than those it was fit to.",
        "Divide the weights that are left by the share that is left, as F.dropout does.",
        "p = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)",
    ),
    "logits-changed": CatalogueEntry(
        "wrong",
        "A larger q·k should give a larger weight. Here some give a smaller one, opposite products weigh alike, large "
        "ones are all the same, or a query's logits are rescaled by each other.",
        "Change nothing between the product and the softmax but scale, mask, bias, and a cap that is odd, as tanh.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5",
    ),
    # ------------------------------------------------------------ scale
    "scale-missing": CatalogueEntry(
        "wrong",
        "Dot products grow with the width of a head: the softmax saturates, and gradients vanish.",
        "Divide the scores by the square root of the head's width.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5",
    ),
    "scale-without-root": CatalogueEntry(
        "wrong",
        "Divided by D instead of its square root, the logits are too small, and all weights nearly alike.",
        "Divide the scores by the square root of the head's width.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)",
    ),
    "scaled-twice": CatalogueEntry(
        "wrong",
        "Two factors of 1/√D make 1/D: the logits are too small, and all weights nearly alike.",
        "Scale in one place; scaled_dot_product_attention already does.",
        "out = F.scaled_dot_product_attention(q, k, v)  # q not scaled before",
    ),
    "scale-multiplied": CatalogueEntry(
        "wrong",
        "Multiplied instead of divided, the logits are so large that the softmax picks one key.",
        "Divide the scores by the square root of the head's width.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(D)",
    ),
    "scale-of-length": CatalogueEntry(
        "wrong",
        "Divided by the square root of the length, the weights depend on how long the text is.",
        "Divide by the width of a head, the last axis of q.",
        "scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))",
    ),
    "scale-sqrt-embed-dim": CatalogueEntry(
        "unusual",
        "The width of the model instead of a head's: logits are smaller by √H, weights flatter. Some tutorials do so.",
        "Divide by the square root of the head's width, unless weights were trained like this.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5  # D = E // H",
    ),
    "scale-unusual": CatalogueEntry(
        "unusual",
        "Another scale than 1/√D makes the weights sharper or flatter than usual.",
        "Specify scale= if it is meant, else divide by the square root of the head's width.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5",
    ),
    "scale-not-uniform": CatalogueEntry(
        "unusual",
        "Heads, queries or keys with factors of their own attend more or less sharply than others. A learned "
        "temperature may be meant; where some factors are the usual one, the others lack the scale.",
        "Scale all logits by the same number, unless the factors are meant.",
        "scores = q @ k.transpose(-2, -1) * D**-0.5",
    ),
    # ------------------------------------------------------------ masks
    "looks-into-the-future": CatalogueEntry(
        "wrong",
        "In training the next token is read off instead of predicted; in use it is not there.",
        "Hide every later key before the softmax.",
        "scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float('-inf'))",
    ),
    "sees-one-ahead": CatalogueEntry(
        "wrong",
        "Each token sees the one it is to predict.",
        "The first hidden diagonal is number 1.",
        "hidden = torch.ones(T, T, dtype=torch.bool).triu(1)",
    ),
    "cannot-see-itself": CatalogueEntry(
        "wrong",
        "A token does not see itself, and the first sees nothing, which gives NaN or an even average of the future.",
        "The first hidden diagonal is number 1, not 0.",
        "hidden = torch.ones(T, T, dtype=torch.bool).triu(1)",
    ),
    "cannot-see-the-past": CatalogueEntry(
        "wrong",
        "A token that sees itself alone, or misses earlier ones, cannot use what came before.",
        "Keep every key up to the query's own position.",
        "seen = torch.ones(T, T, dtype=torch.bool).tril()",
    ),
    "mask-inverted": CatalogueEntry(
        "wrong",
        "What was to be hidden is seen, and what was to be seen is hidden. SDPA: True = may be seen; "
        "nn.MultiheadAttention: True = hidden.",
        "Turn the mask around where it is applied.",
        "scores = scores.masked_fill(~seen, float('-inf'))",
    ),
    "mask-after-softmax": CatalogueEntry(
        "wrong",
        "Hidden keys have taken their share of the softmax before it is thrown away: weights sum to less than one.",
        "Hide keys before the softmax.",
        "p = scores.masked_fill(~seen, float('-inf')).softmax(dim=-1)",
    ),
    "mask-fill-too-small": CatalogueEntry(
        "wrong",
        "A hidden key whose logit is an ordinary number gets an ordinary weight.",
        "Fill with minus infinity, not with 0 or a small number.",
        "scores = scores.masked_fill(~seen, float('-inf'))",
    ),
    "bool-mask-added": CatalogueEntry(
        "wrong",
        "Added as a number, True raises a logit by one and hides nothing.",
        "Fill where a boolean mask hides; add only masks that hold 0 and minus infinity.",
        "scores = scores.masked_fill(~seen, float('-inf'))",
    ),
    "mask-on-some-heads": CatalogueEntry(
        "wrong",
        "The other heads see what is hidden.",
        "Give the mask an axis for the heads, so that it applies to all.",
        "mask = mask[:, None]  # [B, 1, Q, K]",
    ),
    "mask-on-some-batches": CatalogueEntry(
        "wrong",
        "The other batch entries see what is hidden.",
        "Give each batch entry its own mask.",
        "mask = padding[:, None, None, :]  # [B, 1, 1, K]",
    ),
    "mask-on-queries": CatalogueEntry(
        "wrong",
        "The rows of padding are hidden instead of its columns: real tokens still attend to padding.",
        "A padding mask belongs to the last axis, the keys.",
        "mask = padding[:, None, None, :]  # [B, 1, 1, K]",
    ),
    "mask-ignored": CatalogueEntry(
        "wrong",
        "The mask is taken and has no effect.",
        "Apply it before the softmax.",
        "scores = scores.masked_fill(~seen, float('-inf'))",
    ),
    "mask-applied-wrong": CatalogueEntry(
        "wrong",
        "Other keys are hidden than the mask says, or code that runs with a mask alone does something else.",
        "Bring the mask to [B, 1, Q, K] before it is applied, and compute the rest as without one.",
        "scores = scores.masked_fill(~seen, float('-inf'))",
    ),
    "nan-on-empty-row": CatalogueEntry(
        "wrong",
        "One NaN spreads to the whole model in the next layer, and to all weights in the backward pass.",
        "Make the weights of a row that may see nothing zero.",
        "p = scores.softmax(dim=-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)",
    ),
    "returned-weights-differ": CatalogueEntry(
        "wrong",
        "The weights that are returned are not the weights that were used.",
        "Return the weights after mask and softmax, of the same heads in the same order.",
        "return out, p",
    ),
    # ------------------------------------------------------------ state and range
    "not-finite": CatalogueEntry(
        "wrong",
        "NaN or infinity in the output of ordinary numbers spreads to everything after it.",
        "Look for a division by zero, a logarithm of zero, or weights that are not initialised.",
        "torch.isfinite(out).all()",
    ),
    "dropout-in-eval": CatalogueEntry(
        "wrong",
        "After .eval() the same input gives another output each time.",
        "Tie dropout to self.training.",
        "p = F.dropout(p, self.dropout, training=self.training)",
    ),
    "training-differs": CatalogueEntry(
        "unusual",
        "Training fits weights that eval does not compute. Only dropout should differ between the two.",
        "Compute scores and weights alike in training and in eval.",
        "p = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)",
    ),
    "state-between-calls": CatalogueEntry(
        "wrong",
        "The output depends on what the module was called with before.",
        "Keep nothing of a call in the module; hand caches in and out.",
        "out, cache = attention(x, cache=cache)",
    ),
    "input-modified": CatalogueEntry(
        "wrong",
        "The caller's tensor has changed: a residual connection adds something else, and the backward pass fails.",
        "Do not write to an input in place.",
        "x = x * scale  # not x *= scale",
    ),
    "gradient-blocked": CatalogueEntry(
        "wrong",
        "Weights that the output depends on get no gradient and so never learn.",
        "Look for detach(), .data, torch.no_grad() or numpy between them and the output.",
        "p = scores.softmax(dim=-1)  # without .detach()",
    ),
    "fp16-overflow": CatalogueEntry(
        "wrong",
        "float16 ends at 65,504: the same input is fine in bfloat16.",
        "Scale before the product, and fill with minus infinity or torch.finfo(dtype).min.",
        "scores = (q * D**-0.5) @ k.transpose(-2, -1)",
    ),
    "decoding-differs": CatalogueEntry(
        "wrong",
        "Text that is generated token by token comes from another function than the one that was trained.",
        "Append new keys and values at the end, and let the last query see all of them (a mask at the bottom right).",
        "k = torch.cat([past_k, k], dim=-2)",
    ),
    "fails-on-batch-of-one": CatalogueEntry(
        "wrong",
        "The last batch of an epoch, or a single request, fails or gives something else.",
        "Do not squeeze axes away without naming them.",
        "x.squeeze(1)  # not x.squeeze()",
    ),
    "batch-variant": CatalogueEntry(
        "wrong",
        "The same text gives other last bits in a batch of another size: training and serving, or two runs, disagree.",
        "Take products whose order of summation does not depend on the number of rows.",
        "headscope.MultiHeadAttention(embed_dim, num_heads, reproducible=True)",
    ),
    "place-variant": CatalogueEntry(
        "wrong",
        "The same text gives other last bits at another place in the batch.",
        "Treat all entries alike: no other path for the rows that are left over, or for the first entry.",
        "headscope.MultiHeadAttention(embed_dim, num_heads, reproducible=True)",
    ),
    "not-permutation-equivariant": CatalogueEntry(
        "unusual",
        "Without positions, tokens in another order give the same outputs in that order; something mixes places.",
        "If positions are meant, ignore this; else check how heads are split and joined.",
        "q = q.view(B, T, H, D).transpose(1, 2)  # [B, H, T, D]",
    ),
    # ------------------------------------------------------------ speed
    "weights-discarded": CatalogueEntry(
        "slow",
        "need_weights keeps torch from its fused kernels, and the averaged weights are thrown away.",
        "Request no weights.",
        "out, _ = self.attention(x, x, x, need_weights=False)",
    ),
    "quadratic-memory": CatalogueEntry(
        "slow",
        "The weights of all pairs are written to memory and read again; a fused kernel keeps none.",
        "Leave it to a fused kernel.",
        "out = headscope.attention(q, k, v)  # or F.scaled_dot_product_attention",
    ),
}
