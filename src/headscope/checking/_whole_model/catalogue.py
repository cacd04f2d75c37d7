"""The catalogue of findings about a whole model: name, severity, why it matters, and how to fix it."""

from __future__ import annotations

from headscope.checking._catalogue import CATALOGUE, CatalogueEntry

PACKED = "several documents are packed into one row, and a mask [B, 1, T, T] separates them"

MODEL_CATALOGUE: dict[str, CatalogueEntry] = {
    # ------------------------------------------------------------ numbers and state
    "not-finite": CATALOGUE["not-finite"],
    "dropout-in-eval": CATALOGUE["dropout-in-eval"],
    "random-in-eval": CatalogueEntry(
        "unusual",
        "After .eval(), the same input gives another output for each seed. Comparisons of two runs then mean nothing.",
        "Draw random numbers in training only, or from a generator with a fixed seed.",
        "noise = torch.randn_like(x) if self.training else 0",
    ),
    "state-between-calls": CatalogueEntry(
        "wrong",
        "The output depends on earlier calls of the model.",
        "Store nothing of a call in the model; pass caches in and return them.",
        "out = model(ids, past_key_values=cache)",
    ),
    # ------------------------------------------------------------ masks
    "looks-into-the-future": CatalogueEntry(
        "wrong",
        "In training, the model copies the next token instead of predicting it; in use, that token does not exist yet.",
        "Pass the causal mask to every layer; look for a path where is_causal and attn_mask are both unset.",
        "F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)",
    ),
    "nan-from-padding": CatalogueEntry(
        "wrong",
        "A query that is masked from every key gives NaN; NaN times weight 0 is NaN, so the next layer spreads it.",
        "Give a row without visible keys a finite output: fill with the lowest number of the dtype, or set it to 0.",
        "scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)",
        "a later layer reads the rows of padding, or the model is trained with them",
    ),
    "mask-ignored": CatalogueEntry(
        "wrong",
        "The mask is accepted and has no effect: real tokens attend to padding, and a batch changes its texts.",
        "Pass the mask on to every attention layer, or raise an error where a mask is not supported.",
        "out = layer(x, attention_mask=attention_mask)",
    ),
    "padding-leaks": CatalogueEntry(
        "wrong",
        "Tokens that the mask hides still change real tokens, so a text depends on what it is padded with.",
        "Apply the mask in every layer, before the softmax; in convolutions and state layers, set masked inputs to 0.",
        "x = x * attention_mask[:, :, None]  # before a convolution or a scan",
        "the padding is not pad_token_id, or numbers other than 0",
    ),
    "padded-batch-of-one-differs": CatalogueEntry(
        "wrong",
        "A padded batch of one takes another path than a larger batch: its logits are off, without an error.",
        "Decide by the contents of the mask, not by the size of the batch.",
        "if attention_mask is not None and not attention_mask.all():  # not attention_mask.shape[0] > 1",
    ),
    "mask-zeroes-rows": CatalogueEntry(
        "wrong",
        "A mask over keys removed queries: their output is 0, and what they should have read is lost.",
        "Mask keys with the mask of the keys. Queries of cross-attention have another length, and no mask.",
        "visible = key_mask[:, None, None, :]  # [B, 1, 1, K], for all queries",
    ),
    "padding-changes-output": CatalogueEntry(
        "wrong",
        "The same text gives another output once it is padded, although what it is padded with does not matter.",
        "Count positions from the first real token, and normalise by the number of real tokens.",
        "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)",
    ),
    "mask-4d-ignored": CatalogueEntry(
        "fragile",
        "A mask [B, 1, Q, K] is accepted and lost: packed documents read their neighbours, without an error.",
        "Hand a mask of four axes on as it is, and set is_causal only where there is no mask.",
        "is_causal = attention_mask is None",
        PACKED,
    ),
    "documents-mixed": CatalogueEntry(
        "fragile",
        "Right for one document in a row. Documents that are packed into one row read each other, without an error.",
        "Separate documents in every layer; convolutions and state layers need the boundaries, too.",
        "mask = document[:, None, :, None] == document[:, None, None, :]  # [B, 1, Q, K]",
        PACKED,
    ),
    # ------------------------------------------------------------ batches and caches
    "fails-on-batch-of-one": CATALOGUE["fails-on-batch-of-one"],
    "batch-changes-output": CatalogueEntry(
        "wrong",
        "The output for one text depends on which other texts are in its batch, by more than rounding.",
        "Keep the batch a leading axis; share no capacity, statistics or sort order among its entries.",
        "logits = model(ids)  # row i depends on ids[i] only",
    ),
    "batch-variant": CATALOGUE["batch-variant"],
    "place-variant": CATALOGUE["place-variant"],
    "decoding-differs": CatalogueEntry(
        "wrong",
        "Text generated token by token comes from another function than the one that was trained.",
        "Count positions and masks from the start of the cache, and append new keys at its end.",
        "positions = cache.get_seq_length() + torch.arange(ids.shape[1])",
    ),
    "chunked-prefill-differs": CatalogueEntry(
        "wrong",
        "A prompt that is read in chunks gives other logits than the same prompt in one piece.",
        "Start each chunk from the state of the last one, and align the causal mask to the end of the keys.",
        "mask = torch.ones(Q, K).tril(K - Q).bool()  # bottom right",
    ),
    # ------------------------------------------------------------ kernels and dtypes
    "implementations-differ": CatalogueEntry(
        "wrong",
        "The same weights compute different functions under different attention implementations.",
        "Compare scale, mask, bias, softcap and sinks of both paths.",
        'model.set_attn_implementation("eager")',
    ),
    "fp16-overflow": CatalogueEntry(
        "fragile",
        "float16 ends at 65,504; the same weights work in bfloat16 and float32.",
        "Run it in bfloat16, or keep the layer that overflows in float32.",
        "model.to(torch.bfloat16)",
        "the model runs in float16",
    ),
    "bf16-overflow": CatalogueEntry(
        "fragile",
        "bfloat16 has the range of float32, so this is not the size of a number: a fill or a division loses it.",
        "Fill masked scores with the lowest number of their own dtype, and divide by numbers that do not round to 0.",
        "scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)",
        "the model runs in bfloat16",
    ),
    # ------------------------------------------------------------ cost
    "weights-discarded": CATALOGUE["weights-discarded"],
    "quadratic-memory": CatalogueEntry(
        "slow",
        "The weights of all pairs are written to memory and read again; a fused kernel stores none.",
        "Load the model with a fused attention implementation.",
        'model.set_attn_implementation("sdpa")',
    ),
}
"""Some entries are those of ``check``: the mistake, its consequence and its fix are the same."""

EXPLAINS: dict[str, frozenset[str]] = {
    "looks-into-the-future": frozenset({"decoding-differs", "chunked-prefill-differs", "mask-4d-ignored"}),
    "mask-ignored": frozenset({"padding-leaks", "padding-changes-output", "padded-batch-of-one-differs",
                               "mask-4d-ignored", "documents-mixed"}),
    "nan-from-padding": frozenset({"fp16-overflow", "bf16-overflow", "padding-changes-output"}),
    "padding-leaks": frozenset({"padding-changes-output", "padded-batch-of-one-differs"}),
    "padded-batch-of-one-differs": frozenset({"padding-changes-output", "mask-4d-ignored", "documents-mixed"}),
    "mask-zeroes-rows": frozenset({"padding-changes-output", "padding-leaks"}),
    "mask-4d-ignored": frozenset({"documents-mixed"}),
    "fails-on-batch-of-one": frozenset({"batch-changes-output", "batch-variant", "place-variant"}),
    "batch-changes-output": frozenset({"padded-batch-of-one-differs", "padding-leaks", "padding-changes-output",
                                       "batch-variant", "place-variant"}),
    "decoding-differs": frozenset({"chunked-prefill-differs"}),
    "weights-discarded": frozenset({"quadratic-memory"}),
    "batch-variant": frozenset({"place-variant"}),
}  # fmt: skip
"""Finding -> findings that follow from it and are not reported separately."""
