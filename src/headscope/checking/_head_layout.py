"""A recorded forward pass, sorted by batch entry, head, query and key, and the faults of its layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._provenance import INPUT, MIXED, NONE, SUMMED, Mixing, Provenance
from headscope.checking._catalogue import Severity

OUT_OF_PLACE = ("heads-split-wrong", "batches-mixed", "values-misplaced")
"""Faults after which the heads cannot be identified."""


@dataclass(frozen=True)
class Fault:
    """A mistake of the layout.

    Attributes:
        name: the name of the finding.
        evidence: the numbers and positions that show it.
        merge: whether the merge of the heads can still be checked.
        severity: that of the finding; None = as in the catalogue.
    """

    name: str
    evidence: str
    merge: bool = True
    severity: Severity | None = None


@dataclass(frozen=True)
class Heads:
    """The attention of one forward pass.

    Attributes:
        p: the weights the values were multiplied by, [B, H, Q, K].
        raw: the bare products of the operands of the scores, [B, H, Q, K].
        factor: the factor that scaled those operands after their projection, [B, H, Q, K]; of a pair without a
            product, the largest of its head.
        unattributed: weight of keys that do not belong to a token, [B, H, Q].
        width: D.
        queries, keys, values: the first feature of each head's operands; one number for one row of some weights.
        together: how many of them each product with values has, where each has as many of its own; else all.
    """

    p: Tensor
    raw: Tensor
    factor: Tensor
    unattributed: Tensor
    width: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    together: int

    @property
    def count(self) -> int:
        return self.p.shape[1]


@dataclass(frozen=True)
class Arrangement:
    """The heads of a forward pass.

    Attributes:
        heads: the attention, or None where it could not be identified.
        faults: the mistakes of the layout.
        reason: why the heads could not be identified; "" where they were.
    """

    heads: Heads | None
    faults: list[Fault]
    reason: str


@dataclass(frozen=True)
class _Rows:
    """The rows of one product of weights and values: [R], or [R, K] by key. Tokens and features are numbers."""

    query_token: Tensor
    key_token: Tensor
    query_feature: Tensor
    key_feature: Tensor
    value_feature: Tensor
    value_token: Tensor
    p: Tensor
    raw: Tensor
    factor: Tensor

    @property
    def valid(self) -> Tensor:
        return self.key_token != NONE


def arrange_heads(record: Provenance, batch: int, length: int) -> Arrangement:
    """Identify the heads of a forward pass over [batch, length] tokens and the faults of their layout."""
    if not record.mixings and record.convolved:
        return Arrangement(None, [], "a convolution computes numbers of several neighbours, which is not followed")
    if not record.mixings:
        reason = "tokens are summed, and no product of queries and keys was observed before"
        missing = "no product of attention weights with values was observed"
        return Arrangement(None, [], reason if record.tokens_summed else missing)
    rows = [part for part in (_rows_of(record, mixing) for mixing in record.mixings) if len(part.query_token)]
    if not rows:
        return Arrangement(None, [], "no query is computed from a token")
    if any(bool((x == SUMMED).any()) for part in rows for x in (part.query_token, part.key_token, part.value_token)):
        return Arrangement(None, [], "queries, keys or values are sums over tokens, as in Linformer")
    faults = _find_misplaced(rows, length) or _find_layout_faults(record, rows)
    if all(fault.merge for fault in faults):
        faults += _find_merge_faults(record)
    if record.pairs_summed and any(fault.name in OUT_OF_PLACE for fault in faults):
        return Arrangement(None, [], "weights or scores of several pairs of tokens are added")
    if any(fault.name in OUT_OF_PLACE for fault in faults):
        return Arrangement(None, faults, "tokens are out of place")
    heads = _collect_heads(rows, batch, length, record)
    return Arrangement(heads, faults, "" if heads is not None else "not every query occurs exactly once in every head")


def _rows_of(record: Provenance, mixing: Mixing) -> _Rows:
    ids, values = mixing.ids, mixing.values
    n, queries, keys = ids.shape
    first, second = record.token[ids], record.other_token[ids]
    query_feature, key_feature = record.feature[ids], record.other_feature[ids]
    if _varies(first, ids > 0) and not _varies(second, ids > 0):  # the keys stood on the left of the product
        first, second, query_feature, key_feature = second, first, key_feature, query_feature

    def first_known(x: Tensor) -> Tensor:  # the first entry that is known
        at = (ids > 0).int().argmax(-1, keepdim=True)
        return x.gather(-1, at).reshape(-1)

    def spread_over_keys(x: Tensor) -> Tensor:
        return x[:, None].expand(n, queries, keys).reshape(-1, keys)

    token = record.token[values]
    low = token.amin(-1)
    value_token = torch.where(low == token.amax(-1), low, MIXED)
    query_token = first_known(first)
    rows = _Rows(
        query_token=query_token,
        key_token=torch.where(ids > 0, second, NONE).reshape(-1, keys),
        query_feature=first_known(query_feature),
        key_feature=key_feature.reshape(-1, keys),
        value_feature=spread_over_keys(record.feature[values].amin(-1)),
        value_token=spread_over_keys(value_token),
        p=mixing.weights.reshape(-1, keys),
        raw=record.value[ids].reshape(-1, keys),
        factor=record.factor[ids].reshape(-1, keys),
    )
    belongs = query_token != NONE  # queries of padding, or of a token of the module's own, are dropped
    return _Rows(**{name: x[belongs] for name, x in vars(rows).items()})


def _varies(x: Tensor, known: Tensor) -> bool:
    """Return whether known entries differ along the last axis."""
    high = torch.where(known, x, torch.iinfo(x.dtype).min).amax(-1)
    low = torch.where(known, x, torch.iinfo(x.dtype).max).amin(-1)
    return bool((high > low).any())


def _find_misplaced(rows: list[_Rows], length: int) -> list[Fault]:
    """Return the fault of a query without the keys of its batch entry, or of a key without its own value."""
    if all(_all_in_place(part, length) for part in rows):
        return []
    pairs, misplaced = set[tuple[int, int]](), list[Fault]()
    for part in rows:
        valid = part.valid
        for i in range(len(part.query_token)):
            at = valid[i]
            if not bool(at.any()):
                continue
            keys, key_features, query = part.key_token[i][at], part.key_feature[i][at], int(part.query_token[i])
            tokens: list[int] = keys.tolist()
            mixed = query == MIXED or MIXED in tokens
            if mixed or len(set(tokens)) < len(tokens) or len(set(key_features.tolist())) > 1:
                return [_split_fault(query, tokens, key_features.tolist(), length)]
            if any(token // length != query // length for token in tokens):
                return [_leak_fault(query, tokens, length)]
            pairs.add((int(part.query_feature[i]), int(key_features[0])))
            values, value_features = part.value_token[i][at], part.value_feature[i][at]
            others = {token // length for token in values.tolist() if token >= 0} - {query // length}
            if (
                others and len(set(value_features.tolist())) == 1
            ):  # the batch is folded with the heads in another order than for q
                entries = ", ".join(map(str, sorted(others)))
                subject = f"the weights of a query of batch entry {query // length}"
                evidence = f"{subject} are multiplied by values of batch entry {entries}"
                return [Fault("batches-mixed", evidence, merge=False)]  # one output gets values of several heads
            if values.tolist() != tokens or len(set(value_features.tolist())) > 1:
                places = (_format_positions(tokens, length), _format_positions(values.tolist(), length))
                evidence = f"the weights of keys {places[0]} are multiplied by values {places[1]}"
                name = "heads-split-wrong" if len(set(value_features.tolist())) > 1 else "values-misplaced"
                misplaced.append(Fault(name, evidence))
    if not _are_paired(torch.tensor(sorted(pairs)).view(-1, 2)):
        return [Fault("heads-split-wrong", "queries of one head are multiplied by keys of several heads")]
    return misplaced[:1]


def _are_paired(pairs: Tensor) -> bool:
    """Return whether, in distinct pairs of heads [N, 2], one column determines the other.

    The second determines the first where heads are grouped and the weights transposed: queries then stand for keys.
    """
    return len(pairs) == max((len(one.unique()) for one in pairs.T), default=0)


def _all_in_place(part: _Rows, length: int) -> bool:
    """Return whether every row is in place; this is faster than the search for the one that is not."""
    keys, query, valid = part.key_token, part.query_token[:, None], part.valid
    if bool(((keys == MIXED) | (query == MIXED)).any()):
        return False
    once = torch.where(valid, keys, -10 - torch.arange(keys.shape[1])).sort(-1).values.diff(dim=-1)
    here = ((keys // length == query // length) & (part.value_token == keys)) | ~valid
    at = valid.int().argmax(-1, keepdim=True)
    same = [((x == x.gather(-1, at)) | ~valid).all() for x in (part.key_feature, part.value_feature)]
    pairs = torch.stack([part.query_feature, part.key_feature.gather(-1, at)[:, 0]], -1).unique(dim=0)
    return bool((once != 0).all()) and bool(here.all()) and all(same) and _are_paired(pairs)


def _split_fault(query: int, tokens: list[int], features: list[int], length: int) -> Fault:
    """Describe a query whose keys are not one head's part of each token."""
    whole = f"one from each of the tokens 0–{length - 1}" if len(tokens) == length else "one from each token"
    positions, distinct = _format_positions(tokens, length), set(tokens)
    if query == MIXED:
        evidence = "a query of one head holds numbers of several tokens, expected one token"
    elif distinct == {MIXED}:
        evidence = "each key of one head holds numbers of several tokens, expected one token"
    elif len(distinct) == 1:
        evidence = (
            f"in one head, all {len(tokens)} keys of a query come from token {tokens[0] % length}, expected {whole}"
        )
    elif MIXED in distinct or len(distinct) < len(tokens):
        evidence = f"in one head, the keys of a query come from tokens {positions}, expected {whole}"
    else:
        parts = len(set(features))
        evidence = f"the keys of one query come from {parts} different parts of the projection, expected one head"
    return Fault("heads-split-wrong", evidence)


def _leak_fault(query: int, tokens: list[int], length: int) -> Fault:
    subject = f"the query at position {query % length} of batch entry {query // length}"
    entries = sorted({token // length for token in tokens})
    word = "entry" if len(entries) == 1 else "entries"
    return Fault("batches-mixed", f"{subject} attends to keys of batch {word} {', '.join(map(str, entries))}")


def _format_positions(tokens: list[int], length: int) -> str:
    return ", ".join("several at once" if token == MIXED else str(token % length) for token in tokens)


def _find_layout_faults(record: Provenance, rows: list[_Rows]) -> list[Fault]:
    """Return the faults that leave every token in its place."""
    faults: list[Fault] = []
    projected = bool((record.kind != INPUT)[record.operands[0].left].any()) if record.operands else False
    query, key, value = (torch.cat(each) for each in zip(*(_features_of(part) for part in rows), strict=True))
    if projected and not _are_zero(record, key):
        if torch.equal(query, key):
            faults.append(
                Fault("keys-are-queries", "queries and keys are projected by the same rows of the same weights")
            )
        if torch.equal(key, value) or torch.equal(query, value):
            other = "keys" if torch.equal(key, value) else "queries"
            latent = other == "keys" and len(key.unique()) == 1 < len(query.unique())
            shared = ", one vector for all heads, as in latent attention" if latent else ""
            evidence = f"values and {other} are projected by the same rows of the same weights{shared}"
            faults.append(Fault("values-are-keys", evidence, severity="unusual" if latent else None))
        elif bool((record.kind[record.mixings[0].values] == INPUT).all()):
            faults.append(Fault("values-not-projected", "the values are the input itself"))
    faults += _find_interleaved(record)
    keys, values = _order_groups(query, key), _order_groups(query, value)
    evidence = f"query heads 0, 1, 2, … use key heads {', '.join(map(str, keys))}"
    if len(set(keys)) == len(set(values)) < len(keys) and keys != values:
        both = f"{evidence} with value heads {', '.join(map(str, values))}"
        faults.append(Fault("kv-heads-tiled", f"{both}: keys and values are grouped in different orders"))
    elif len(set(keys)) < len(keys) and keys != sorted(keys):
        faults.append(Fault("kv-heads-tiled", evidence))
    return faults


def _are_zero(record: Provenance, features: Tensor) -> bool:
    """Return whether these are features of projections by zeros, whose rows are the same without being shared."""
    used = [each.weights for each in record.projections if bool(torch.isin(features, each.features).any())]
    return bool(used) and not any(bool(weights.any()) for weights in used)


def _find_interleaved(record: Provenance) -> list[Fault]:
    """Return the fault of a head whose values, queries or keys are equally spaced rows of a projection, if any."""
    operands = {"values": [mixing.values for mixing in record.mixings]}
    if record.operands:
        operands["queries"] = [each.left for each in record.operands]
        operands["keys"] = [each.right.transpose(1, 2) for each in record.operands]
    for name, all_ids in operands.items():
        steps = record.feature[all_ids[0][0, 0]].diff()
        if not len(steps) or not int(steps.amin()) == int(steps.amax()) > 1:
            continue
        offsets = torch.cat([record.feature[ids].flatten() % steps[0] for ids in all_ids])
        if bool((offsets != offsets[0]).any()):  # no head has what is in between where numbers are complex
            evidence = f"a head takes its {name} from the projection in steps of {int(steps[0])}"
            return [Fault("heads-interleaved", f"{evidence}, expected steps of 1")]
    return []


def _features_of(part: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the feature of each row's query, keys and values, [R] each."""
    return part.query_feature, part.key_feature.amax(-1), part.value_feature.amax(-1)


def _order_groups(query: Tensor, other: Tensor) -> list[int]:
    """Return the number of the key or value head that each query head uses, in the order of query heads."""
    partner = dict(sorted(zip(query.tolist(), other.tolist(), strict=True)))
    order = sorted(set(partner.values()))
    return [order.index(head) for head in partner.values()]


def _find_merge_faults(record: Provenance) -> list[Fault]:
    """Return the fault of how the outputs of the heads are joined, if any."""
    if record.heads_summed:
        return [Fault("heads-not-joined", "the heads' outputs are summed over the heads before the output projection")]
    for ids in (projection.ids for projection in record.projections):
        if not record.holds_heads(ids):
            continue
        token, feature = record.token[ids], record.feature[ids]
        tokens = token[0, 0].tolist()
        if bool((token != token[..., :1]).any()):
            row = int((token != token[..., :1]).any(-1).flatten().int().argmax())
            mixed = sorted(set(token.flatten(0, 1)[row].tolist()))
            evidence = f"row {row} of the output projection's input holds numbers of {len(mixed)} tokens, expected one"
            return [Fault("heads-merged-wrong", evidence)]
        if bool((feature != feature[:, :1]).any()) and len(set(tokens)) == 1:
            return [Fault("heads-merged-wrong", "the heads are joined in different orders for different tokens")]
    return []


def _collect_heads(rows: list[_Rows], batch: int, length: int, record: Provenance) -> Heads | None:
    keyed = [list(zip(*(x.tolist() for x in _features_of(part)), strict=True)) for part in rows]
    order = sorted({key for keys in keyed for key in keys})
    shape = (batch, len(order), length, length)
    p, raw, factor = torch.zeros(shape).double(), torch.zeros(shape).double(), torch.full(shape, -math.inf).double()
    unattributed, filled = torch.zeros(shape[:3]).double(), torch.zeros(shape[:3])
    number = {key: h for h, key in enumerate(order)}
    for part, keys in zip(rows, keyed, strict=True):
        h = torch.tensor([number[key] for key in keys])
        b, i = part.query_token // length, part.query_token % length
        where = (b[:, None], h[:, None], i[:, None], (part.key_token % length))
        valid = part.valid
        at = tuple(x.expand(part.key_token.shape)[valid] for x in where)
        p[at], raw[at], factor[at] = part.p[valid], part.raw[valid], part.factor[valid]
        unattributed[b, h, i] = (part.p * ~valid).sum(-1)
        filled.index_put_((b, h, i), torch.ones(len(b)), accumulate=True)
    if not bool((filled == 1).all()):
        return None
    factor = torch.where(factor.isfinite(), factor, factor.amax((0, 2, 3), keepdim=True)).nan_to_num(1.0, 1.0, 1.0)
    firsts = (tuple(key[n] for key in order) for n in range(3))
    products = {frozenset(keys) for keys in keyed}
    sizes = {len(each) for each in products}
    size = min(sizes) if len(sizes) == 1 and sum(map(len, products)) == len(order) else len(order)
    return Heads(p, raw, factor, unattributed, record.operands[0].width, *firsts, together=size)
