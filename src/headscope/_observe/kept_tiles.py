"""Exact pieces of the weights of an observed call, computed from copies of its q and k when they are requested."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._attend.interface import Inputs, full_precision
from headscope._attend.select import select
from headscope._observe import inputs as observe_inputs
from headscope._observe.block_weights import ROUNDING, Rows, weights
from headscope._observe.inputs import Request
from headscope._observe.scene import Scene
from headscope._support.fingerprint import Fingerprint
from headscope._support.precision import exact_products
from headscope.masks import Dense, Mask
from headscope.stats._kept_weights import MOST_REST, KeptWeights, NoWeightsError, check_within, written_to


def keep_tiles(request: Request, known: Scene) -> ObservedTiles:
    """Return access to the weights of a request, from copies of its q and k."""
    scene = _for_tiles(request, known)
    read = [_Read(name, x) for name, x in (("bias", scene.inputs.bias), ("sinks", scene.inputs.sinks)) if x is not None]
    if scene.plan is not None and scene.plan.rest is not None:
        rest, originals = scene.plan.rest, iter(scene.plan.rest_tensors())
        read += [
            _Read("mask", next(originals), isinstance(leaf, Dense)) for leaf in rest.leaves() for _ in leaf.tensors()
        ]
    return ObservedTiles(scene, tuple(read), _offsets(known))


class _Read:
    """A caller's tensor that tiles read, and a fingerprint of its contents when it was observed."""

    def __init__(self, name: str, tensor: Tensor, by_row: bool | None = None) -> None:
        self.name = name
        self.tensor = tensor
        self.fingerprint = Fingerprint(tensor)
        by_row = name == "bias" if by_row is None else by_row
        self.by_row = by_row and tensor.ndim > 1 and tensor.shape[-2] > 1  # axis -2 is Q

    def check(self, i0: int, i1: int) -> None:
        """Raise unless its contents are unchanged, as far as the query rows i0 to i1 read it."""
        if not self.fingerprint.matches(self.tensor, (..., slice(i0, i1), slice(None)) if self.by_row else ()):
            raise written_to(self.name, self.tensor.shape)


_NOWHERE = -(2**62)
_LARGE = 128.0  # from this size on, lse is computed in float64: float32 rounds a larger one by more than 1e-5


def _offsets(scene: Scene) -> Tensor | None:
    """Return the offset of each row of the first batch entry from its index to its key, int64 [R].

    ``_NOWHERE`` if a specified position is not that of a key; None in cross-attention.
    """
    at = scene.own if scene.line is None else scene.line
    if at is None:
        return None
    offsets = at[:1] - torch.tensor(list(scene.rows), dtype=torch.long, device=at.device)  # [1, R]
    return (offsets if scene.line is not None else offsets.masked_fill(at[:1] < 0, _NOWHERE)).flatten()


def _for_tiles(request: Request, scene: Scene) -> Scene:
    """Return a scene of all rows, with only the inputs of the weights."""
    call, inputs = request.call, request.inputs
    # copies: the model may write to its own tensors, as caches do
    q, k = inputs.q.detach().clone(), inputs.k.detach().clone()
    slim = Inputs(q, k, k[..., :0], inputs.bias, inputs.sinks)
    lse = None if request.lse is None else request.lse.detach().reshape(call.batch, call.heads, call.queries).clone()
    return replace(
        scene, inputs=slim, rows=range(call.queries), q=q, lse=lse, may_count=None,
        line=None, q_at=None, k_at=None, own=None, ids=None, id_before=None, has_norms=False,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ObservedTiles:
    """p[i0:i1, j0:j1] on demand, [*lead, H, i, j].

    Attributes:
        scene: the inputs of the weights: copies of q and k, and the caller's own bias, sinks and mask, which may be as
            large as the weights.
        read: the caller's own tensors, with their fingerprints.
        offsets: see ``_offsets``; read only on request, because reading may wait for a device.
    """

    scene: Scene
    read: tuple[_Read, ...]
    offsets: Tensor | None

    def __call__(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        call = self.scene.call
        check_within((i0, i1), (j0, j1), call.queries, call.keys)
        for each in self.read:
            each.check(i0, i1)
        step = max(1, observe_inputs.BLOCK // max(1, call.heads * call.keys))
        parts = [self.scene.q.new_zeros(call.batch, call.heads, 0, j1 - j0)]
        with torch.no_grad(), full_precision(call), exact_products(call.device):
            for b in range(call.batch):
                pieces = [self._rows(b, slice(i, min(i + step, i1)))[..., j0:j1] for i in range(i0, i1, step)]
                parts += [torch.cat(pieces, 2)] if pieces else []
        if i0 == i1 or call.batch == 0:
            return parts[0].reshape(*call.lead, call.heads, i1 - i0, j1 - j0)
        return torch.cat(parts[1:]).reshape(*call.lead, call.heads, i1 - i0, j1 - j0)  # [*lead, H, i, j]

    def to_weights(self) -> KeptWeights:
        """Return the same from tensors only, with the lse of its rows.

        Raises:
            NoWeightsError: a mask that spans cannot express has more pairs than ``MOST_REST``; or a bias, sinks or mask
                were overwritten.
        """
        call, scene = self.scene.call, self.scene
        for each in self.read:
            each.check(0, call.queries)
        with torch.no_grad(), full_precision(call), exact_products(call.device):
            lse = self._exact_lse()
        # in rows without visible keys exp(s - inf) = 0; an infinite logit has no weights
        lse = torch.where(lse == -torch.inf, torch.inf, torch.where(lse.isfinite(), lse, torch.nan))
        parts = {"q": scene.q, "k": scene.inputs.k, "lse": lse}
        if scene.inputs.bias is not None:
            parts["bias"] = scene.inputs.bias
        if scene.plan is not None and not scene.plan.everything:
            parts["spans"] = scene.plan.spans
            if scene.plan.rest is not None:
                parts["rest"] = self._rest(scene.plan.rest)
        tensors = {name: x.detach().cpu().contiguous() for name, x in parts.items()}
        held = {each.tensor.data_ptr() for each in self.read}
        shared = {name: Fingerprint(x) for name, x in tensors.items() if x.data_ptr() in held}
        return replace(KeptWeights.of(tensors, call.lead, call.scale, call.softcap, self._offset()), shared=shared)

    def _offset(self) -> int | None:
        """Return the position of query 0, if all rows agree on it."""
        offsets = {*(() if self.offsets is None else self.offsets.tolist())} - {_NOWHERE}
        return offsets.pop() if len(offsets) == 1 else None

    def _lse(self, call: Call, inputs: Inputs) -> Tensor:
        """Return lse from any backend that supports the call."""
        call_for_lse = replace(call, v_head_dim=1, lse=True, grad=False, bias_grad=False, dropout=0.0)
        values = inputs.k.new_zeros(1).expand(*inputs.k.shape[:3], 1).contiguous()
        _, lse = select(call_for_lse).attend(call_for_lse, self.scene.plan, inputs._replace(v=values))
        assert lse is not None  # every backend that supports a call with lse returns it
        return lse.reshape(call.batch, call.heads, call.queries)

    def _exact_lse(self) -> Tensor:
        """Return lse; in float64, if the device has it and float32 is too coarse.

        A different specified lse does not change.
        """
        call, inputs, own = self.scene.call, self.scene.inputs, self.scene.lse
        lse = self._lse(call, inputs) if own is None else own
        large = lse.dtype.itemsize < 4 or bool((lse.isfinite() & (lse.abs() > _LARGE)).any())
        if not large or torch.float64 in (lse.dtype, call.dtype) or lse.device.type == "mps":
            return lse
        exact = self._lse(replace(call, dtype=torch.float64), inputs._replace(q=inputs.q.double(), k=inputs.k.double()))
        same = lse.isfinite()
        if own is not None:
            same &= (exact - lse).abs() <= ROUNDING[lse.dtype] * exact.abs().clamp_min(1.0)
        return torch.where(same, exact, lse.double())

    def _rest(self, rest: Mask) -> Tensor:
        call = self.scene.call
        tensor = rest.tensor if isinstance(rest, Dense) else None
        if tensor is not None:
            return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
        if call.batch * call.heads * call.queries * call.keys > MOST_REST:
            raise NoWeightsError(f"mask: {rest} has more than {MOST_REST:,} pairs, too many to save with q and k")
        b, h, i, j = (slice(0, n) for n in (call.batch, call.heads, call.queries, call.keys))
        return rest.tile(b, h, i, j, self.scene.q.device).expand(-1, -1, call.queries, call.keys)

    def _rows(self, b: int, i: slice) -> Tensor:
        scene, one = self.scene, slice(b, b + 1)
        lse = None if scene.lse is None else scene.lse[one, :, i]
        rows = Rows(scene.q[one, :, i], one, slice(0, scene.call.kv_heads), i, lse, None)
        if 0 in (scene.call.heads, scene.call.keys):
            return scene.q.new_zeros(1, scene.call.heads, i.stop - i.start, scene.call.keys)
        tile = weights(scene, rows, slice(0, scene.call.keys))
        if scene.clean:
            return tile.p
        not_finite = tile.broken[..., None] if tile.visible is None else tile.broken[..., None] & tile.visible
        return tile.p.masked_fill(not_finite, torch.nan)
