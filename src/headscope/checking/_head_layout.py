"""What a tap saw, sorted by batch entry, head, query and key; and what does not fit into that order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._provenance.tap import HEADS, INPUT, MIXED, NONE, Mixing, Seen


@dataclass(frozen=True)
class Fault:
    """Something of the layout that is not as it should be.

    Attributes:
        name: the finding's.
        seen: what shows it.
        merge: whether the merge of the heads can be checked all the same.
    """

    name: str
    seen: str
    merge: bool = True


@dataclass(frozen=True)
class Heads:
    """The attention of one forward pass.

    Attributes:
        p: the weights the values were multiplied by, [B, H, Q, K].
        raw: the bare products of the operands of the scores, [B, H, Q, K].
        factor: by what those operands were scaled after their projection, [B, H, Q, K].
        beside: mass on keys that belong to no token, [B, H, Q].
        width: D.
        queries, keys, values: the first feature of each head's operands; one number for one row of some weights.
    """

    p: Tensor
    raw: Tensor
    factor: Tensor
    beside: Tensor
    width: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.p.shape[1]


@dataclass(frozen=True)
class _Rows:
    """The rows of one product of weights and values: [R], or [R, K] by key."""

    u: Tensor
    w: Tensor
    fq: Tensor
    fk: Tensor
    fv: Tensor
    v: Tensor
    p: Tensor
    raw: Tensor
    factor: Tensor

    @property
    def valid(self) -> Tensor:
        return self.w != NONE


def arrange(seen: Seen, batch: int, length: int) -> tuple[Heads | None, list[Fault], str]:
    """The heads of a forward pass over [batch, length] tokens.

    Returns:
        the heads, or None where they cannot be told; faults of the layout; why there are no heads, if there are none.
    """
    if not seen.mixings:
        why = "tokens were summed before there were scores of queries with keys, as in linear attention"
        return None, [], why if seen.over_tokens else "no product of attention weights with values was seen"
    rows = [part for part in (_rows(seen, mixing) for mixing in seen.mixings) if len(part.u)]
    if not rows:
        return None, [], "no query was made of a token"
    faults = _faults(rows, length) or _unsplit(seen, rows)
    if all(fault.merge for fault in faults):
        faults += _merged(seen)
    if any(fault.name in ("heads-split-wrong", "batches-mixed", "values-misplaced") for fault in faults):
        return None, faults, "the tokens are not where they belong"
    heads, why = _dense(rows, batch, length, seen)
    return heads, faults, why


def _rows(seen: Seen, mixing: Mixing) -> _Rows:
    ids, values = mixing.ids, mixing.values
    n, queries, keys = ids.shape
    first, second = seen.token[ids], seen.other[ids]
    fq, fk = seen.feature[ids], seen.second[ids]
    if _varies(first, ids > 0) and not _varies(second, ids > 0):  # the keys stood on the left of the product
        first, second, fq, fk = second, first, fk, fq

    def of_row(x: Tensor) -> Tensor:  # the first entry that is known
        at = (ids > 0).int().argmax(-1, keepdim=True)
        return x.gather(-1, at).reshape(-1)

    def by_key(x: Tensor) -> Tensor:
        return x[:, None].expand(n, queries, keys).reshape(-1, keys)

    token = seen.token[values]
    low = token.amin(-1)
    v = torch.where(low == token.amax(-1), low, MIXED)
    u = of_row(first)
    found = _Rows(
        u=u, w=torch.where(ids > 0, second, NONE).reshape(-1, keys), fq=of_row(fq), fk=fk.reshape(-1, keys),
        fv=by_key(seen.feature[values].amin(-1)), v=by_key(v), p=mixing.weights.reshape(-1, keys),
        raw=seen.value[ids].reshape(-1, keys), factor=seen.factor[ids].reshape(-1, keys),
    )  # fmt: skip
    ours = u != NONE  # queries of padding, or of a token of the module's own, are cut off behind
    return _Rows(**{name: x[ours] for name, x in vars(found).items()})


def _varies(x: Tensor, known: Tensor) -> bool:
    """Whether entries that are known differ along the last axis."""
    high = torch.where(known, x, torch.iinfo(x.dtype).min).amax(-1)
    low = torch.where(known, x, torch.iinfo(x.dtype).max).amin(-1)
    return bool((high > low).any())


def _faults(rows: list[_Rows], length: int) -> list[Fault]:
    """Whether each query meets the keys of its own batch entry, each once, and each key its own value."""
    if all(_in_place(part, length) for part in rows):
        return []
    pairs, misplaced = set[tuple[int, int]](), list[Fault]()
    for part in rows:
        valid = part.valid
        for i in range(len(part.u)):
            at = valid[i]
            if not bool(at.any()):
                continue
            w, fk, u = part.w[i][at], part.fk[i][at], int(part.u[i])
            tokens: list[int] = w.tolist()
            mixed = u == MIXED or MIXED in tokens
            if mixed or len(set(tokens)) < len(tokens) or len(set(fk.tolist())) > 1:
                return [_split("the keys of one query of one head", tokens, length)]
            if any(token // length != u // length for token in tokens):
                return [_leak(u, tokens, length)]
            pairs.add((int(part.fq[i]), int(fk[0])))
            v, fv = part.v[i][at], part.fv[i][at]
            others = {token // length for token in v.tolist() if token >= 0} - {u // length}
            if others and len(set(fv.tolist())) == 1:  # folded into one axis with the heads, in another order than q
                entries = ", ".join(map(str, sorted(others)))
                said = f"the weights of a query of batch entry {u // length} fall on values of batch entry {entries}"
                return [Fault("batches-mixed", said, merge=False)]  # it sees values of several heads for one output
            if v.tolist() != tokens or len(set(fv.tolist())) > 1:
                said = f"the weights of keys {_places(tokens, length)} fall on values {_places(v.tolist(), length)}"
                name = "heads-split-wrong" if len(set(fv.tolist())) > 1 else "values-misplaced"
                misplaced.append(Fault(name, said))
    if not _paired(torch.tensor(sorted(pairs)).view(-1, 2)):
        return [Fault("heads-split-wrong", "queries of one head meet keys of several heads")]
    return misplaced[:1]


def _paired(pairs: Tensor) -> bool:
    """Whether of pairs of heads [N, 2], each once, the second follows from the first, or the first from the second.

    The latter is so where heads are grouped and the weights transposed, so that queries stand for keys.
    """
    return len(pairs) == max((len(one.unique()) for one in pairs.T), default=0)


def _in_place(part: _Rows, length: int) -> bool:
    """Whether nothing is amiss in any row: quicker to tell than what is."""
    w, u, valid = part.w, part.u[:, None], part.valid
    if bool(((w == MIXED) | (u == MIXED)).any()):
        return False
    once = torch.where(valid, w, -10 - torch.arange(w.shape[1])).sort(-1).values.diff(dim=-1)
    here = ((w // length == u // length) & (part.v == w)) | ~valid
    at = valid.int().argmax(-1, keepdim=True)
    same = [((x == x.gather(-1, at)) | ~valid).all() for x in (part.fk, part.fv)]
    pairs = torch.stack([part.fq, part.fk.gather(-1, at)[:, 0]], -1).unique(dim=0)
    return bool((once != 0).all()) and bool(here.all()) and all(same) and _paired(pairs)


def _split(what: str, tokens: list[int], length: int) -> Fault:
    return Fault("heads-split-wrong", f"{what} come from positions {_places(tokens, length)}, wanted each once")


def _leak(u: int, tokens: list[int], length: int) -> Fault:
    said = f"the query at position {u % length} of batch entry {u // length}"
    entries = sorted({token // length for token in tokens})
    word = "entry" if len(entries) == 1 else "entries"
    return Fault("batches-mixed", f"{said} sees keys of batch {word} {', '.join(map(str, entries))}")


def _places(tokens: list[int], length: int) -> str:
    return ", ".join("several at once" if token == MIXED else str(token % length) for token in tokens)


def _unsplit(seen: Seen, rows: list[_Rows]) -> list[Fault]:
    """Faults that leave every token in its place."""
    faults: list[Fault] = []
    projected = bool((seen.kind != INPUT)[seen.operands[0].left].any()) if seen.operands else False
    pairs = [(part.fq, part.fk.amax(-1), part.fv.amax(-1)) for part in rows]
    fq, fk, fv = (torch.cat(each) for each in zip(*pairs, strict=True))
    if projected:
        if torch.equal(fq, fk):
            faults.append(Fault("keys-are-queries", "queries and keys are made by the same rows of the same weights"))
        if torch.equal(fk, fv) or torch.equal(fq, fv):
            other = "keys" if torch.equal(fk, fv) else "queries"
            faults.append(Fault("values-are-keys", f"values and {other} are made by the same rows of the same weights"))
        elif bool((seen.kind[seen.mixings[0].values] == INPUT).all()):
            faults.append(Fault("values-not-projected", "the values are the input itself"))
    steps = seen.feature[seen.mixings[0].values][0, 0].diff()
    if len(steps) and int(steps.amin()) == int(steps.amax()) > 1:
        said = f"a head takes numbers of the projection that are {int(steps[0])} apart, wanted neighbours"
        faults.append(Fault("heads-interleaved", said))
    keys, values = _groups(fq, fk), _groups(fq, fv)
    said = f"query heads 0, 1, 2, … use key heads {', '.join(map(str, keys))}"
    if len(set(keys)) == len(set(values)) < len(keys) and keys != values:
        both = f"{said} with value heads {', '.join(map(str, values))}: keys and values are grouped in different orders"
        faults.append(Fault("kv-heads-tiled", both))
    elif len(set(keys)) < len(keys) and keys != sorted(keys):
        faults.append(Fault("kv-heads-tiled", said))
    return faults


def _groups(fq: Tensor, other: Tensor) -> list[int]:
    """The number of the key or value head that each query head uses, in their order."""
    partner = dict(sorted(zip(fq.tolist(), other.tolist(), strict=True)))
    order = sorted(set(partner.values()))
    return [order.index(head) for head in partner.values()]


def _merged(seen: Seen) -> list[Fault]:
    """Whether what the heads give is put together token by token."""
    if seen.summed:
        return [Fault("heads-not-joined", "what the heads give is summed over the heads before it is projected")]
    for ids in seen.projections:
        if not bool((seen.kind[ids] == HEADS).all()):
            continue
        token, feature = seen.token[ids], seen.feature[ids]
        tokens = token[0, 0].tolist()
        if bool((token != token[..., :1]).any()):
            row = int((token != token[..., :1]).any(-1).flatten().int().argmax())
            found = sorted(set(token.flatten(0, 1)[row].tolist()))
            said = f"row {row} of what is projected to the output has numbers of {len(found)} tokens, wanted one"
            return [Fault("heads-merged-wrong", said)]
        if bool((feature != feature[:, :1]).any()) and len(set(tokens)) == 1:
            return [Fault("heads-merged-wrong", "the heads are put together in another order for other tokens")]
    return []


def _dense(rows: list[_Rows], batch: int, length: int, seen: Seen) -> tuple[Heads | None, str]:
    keyed = [
        list(zip(part.fq.tolist(), part.fk.amax(-1).tolist(), part.fv.amax(-1).tolist(), strict=True)) for part in rows
    ]
    order = sorted({key for keys in keyed for key in keys})
    shape = (batch, len(order), length, length)
    p, raw, factor = torch.zeros(shape).double(), torch.zeros(shape).double(), torch.ones(shape).double()
    beside, filled = torch.zeros(shape[:3]).double(), torch.zeros(shape[:3])
    number = {key: h for h, key in enumerate(order)}
    for part, keys in zip(rows, keyed, strict=True):
        h = torch.tensor([number[key] for key in keys])
        b, i = part.u // length, part.u % length
        where = (b[:, None], h[:, None], i[:, None], (part.w % length))
        valid = part.valid
        at = tuple(x.expand(part.w.shape)[valid] for x in where)
        p[at], raw[at], factor[at] = part.p[valid], part.raw[valid], part.factor[valid]
        beside[b, h, i] = (part.p * ~valid).sum(-1)
        filled.index_put_((b, h, i), torch.ones(len(b)), accumulate=True)
    if not bool((filled == 1).all()):
        return None, "not every query was seen once in every head"
    firsts = (tuple(key[n] for key in order) for n in range(3))
    return Heads(p, raw, factor, beside, seen.operands[0].width, *firsts), ""
