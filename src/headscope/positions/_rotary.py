"""Rotary position embedding, and its tables of cos and sin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from headscope._support.arguments import check_type, kind, shapes
from headscope._support.bounded import BoundedTable
from headscope._support.torch_state import is_traced
from headscope.positions._options import settle_number, settle_whole, to_positions
from headscope.positions._scaling import NTK, LinearScaling, Llama3, Scaling, YaRN

Places: TypeAlias = "Tensor | slice"
"""Positions: integers [T] or [B, T]; or a slice of 0, 1, 2, …"""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: pairs of a head's components, rotated by position · frequency.

    Pair n rotates by m · base ** (-2n / dim) at position m, in q and in k, so q·k depends on the distance only. Angles
    are computed in float64, the rotation in float32 or better.

    Args:
        dim: how many components of each head rotate, from the first: even, at most the head's width; the rest does not
            change (partial rotary).
        base: of the frequencies, above 1.
        pairing: which components form a pair: "half": n and n + dim / 2 (Hugging Face, GPT-NeoX); "interleaved": 2n and
            2n + 1 (the paper, GPT-J, Llama's own weights).
        scaling: ``LinearScaling``, ``NTK``, ``YaRN``, ``Llama3``, or None.

    Raises:
        TypeError, ValueError: a value of the wrong kind or out of range.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34.

    Examples:
        >>> import torch
        >>> from headscope import positions
        >>> x = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])  # [H, T, D]
        >>> positions.Rotary(2).rotate(x, torch.tensor([0, 1]))
        tensor([[[1.0000, 0.0000],
                 [0.5403, 0.8415]]])
    """

    dim: int
    base: float = 10000.0
    pairing: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        settle_whole(self, "dim")
        if self.dim % 2:
            raise ValueError(f"dim: got {self.dim}, expected an even number, because rotary rotates pairs")
        settle_number(self, "base", above=1)
        if self.pairing not in ("half", "interleaved"):
            raise ValueError(f'pairing: got {self.pairing!r}, expected "half" or "interleaved"')
        if self.scaling is not None:
            expected = "LinearScaling, NTK, YaRN, Llama3 or None"
            check_type("scaling", self.scaling, (LinearScaling, NTK, YaRN, Llama3), expected, kind)
        if isinstance(self.scaling, NTK) and self.dim < 4:
            raise ValueError(f"dim: got {self.dim}, expected at least 4 for NTK, whose exponent is dim / (dim - 2)")

    @property
    def dynamic(self) -> bool:
        """Whether the frequencies depend on the length of the call."""
        return isinstance(self.scaling, NTK) and self.scaling.original_length is not None

    @property
    def attention_factor(self) -> float:
        """The factor of cos and sin: 1, except for YaRN."""
        yarn = self.scaling
        if not isinstance(yarn, YaRN):
            return 1.0
        if yarn.attention_factor is not None:
            return float(yarn.attention_factor)

        def grown(mscale: float) -> float:
            return 0.1 * mscale * math.log(yarn.factor) + 1.0

        if yarn.mscale is None or yarn.mscale_all_dim is None:
            return grown(1.0)
        return grown(yarn.mscale) / grown(yarn.mscale_all_dim)

    def frequencies(self, length: int | None = None) -> Tensor:
        """Return the angle of each pair at position 1, float64 [dim / 2].

        Args:
            length: of the call, for ``NTK(original_length=...)``; by default at most ``original_length``.
        """
        powers = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim  # [dim / 2]
        plain = _constant(self.base) ** -powers
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return plain / _constant(factor)
            case NTK(factor, original):
                return self._grown_base(factor, original, length) ** -powers
            case YaRN():
                unscaled = self._unscaled_share(self.scaling)
                return plain / _constant(self.scaling.factor) * (1 - unscaled) + plain * unscaled
            case Llama3(factor, low, high, original):
                turns = _constant(original) * plain / _constant(2 * math.pi)  # over the trained length
                share = ((turns - _constant(low)) / _constant(high - low)).clamp(0, 1)
                return plain * torch.lerp(_constant(1 / factor).expand_as(plain), torch.ones_like(plain), share)

    def _grown_base(self, factor: float, original: int | None, length: int | None) -> Tensor:
        """Return the base of ``NTK``, float64 []."""
        power = self.dim / (self.dim - 2)
        if original is None:
            return _constant(self.base * factor**power)
        if not is_traced():
            factor = factor * max(length or 0, original) / original - (factor - 1)
            return _constant(self.base * factor**power)
        longest = torch.scalar_tensor(length or 0, dtype=torch.float64, device="cpu").clamp(_constant(original))
        grown = _constant(factor) * longest / _constant(original) - _constant(factor - 1)
        return _constant(self.base) * grown ** _constant(power)

    def _unscaled_share(self, yarn: YaRN) -> Tensor:
        """Return the unscaled share of each pair's frequency: 1 for fast pairs, 0 for slow ones."""

        def pair(turns: float) -> float:
            """Return the pair that makes so many turns over the trained length."""
            return self.dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high = high + 0.001 if low == high else high
        at = torch.arange(self.dim // 2, dtype=torch.float64, device="cpu")
        return 1 - ((at - _constant(low)) / _constant(high - low)).clamp(0, 1)

    def rotate(self, x: Tensor, positions: Places, *, length: int | None = None) -> Tensor:
        """Rotate queries or keys to their positions; the result has x's shape and dtype.

        Args:
            x: [B, H, T, D] or [H, T, D], D at least ``dim``.
            positions: of each token: integers [T] or [B, T]; or a slice of 0, 1, 2, … of length T.
            length: of the call, for ``NTK(original_length=...)``; by default one more than the largest position.

        Raises:
            TypeError, ValueError: a width, or positions, that do not fit.
        """
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"x: axis {x.ndim - 1} (D) is {x.shape[-1]}, expected at least dim {self.dim}; {shapes(x=x)}"
            )
        return self.turn(x, *self.shared_cos_sin(_places(positions, x), x, length))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate by the result of ``cos_sin``: x [..., T, D], cos and sin [T, dim / 2] or [B, 1, T, dim / 2]."""
        wide = x.to(cos.dtype)
        half = self.dim // 2
        if self.pairing == "half":
            a, b = wide[..., :half], wide[..., half : self.dim]
        else:
            a, b = wide[..., : self.dim : 2], wide[..., 1 : self.dim : 2]
        parts = [a * cos - b * sin, b * cos + a * sin]  # each [B, H, T, dim / 2]
        if self.pairing == "interleaved":
            parts = [torch.stack(parts, -1).flatten(-2)]  # [B, H, T, dim]
        if x.shape[-1] > self.dim:
            parts.append(wide[..., self.dim :])
        return (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).to(x.dtype)

    def cos_sin(self, positions: Places, like: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin for ``turn``, in float32 (float64 for float64), on the device of ``like``."""
        cos, sin = self.shared_cos_sin(positions, like, length)
        return cos.clone(), sin.clone()

    def shared_cos_sin(self, positions: Places, like: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a read-only ``cos_sin``: it may be a view of a table that later calls read."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if self.dynamic and length is None:
            length = positions.stop if isinstance(positions, slice) else _most(positions) + 1
        if not self.dynamic and not is_traced() and like.device.type != "meta":
            if isinstance(positions, slice):
                cos, sin = _table(self, positions.stop, like.device, dtype)
                return cos[positions], sin[positions]
            if positions.device.type == "cpu" and positions.numel():
                least, most = (int(each) for each in positions.aminmax())
                sparse = most + 1 > FAR_APART * positions.numel() + FREE  # these do not use a table
                if least >= 0 and (not sparse or _has(self, most + 1, like.device, dtype)):
                    cos, sin = _table(self, most + 1, like.device, dtype)
                    return _rows(cos[positions]), _rows(sin[positions])
        if isinstance(positions, slice):
            positions = torch.arange(positions.start or 0, positions.stop, device=like.device)
        cos, sin = self._angles(positions, length, like.device, dtype)
        return _rows(cos), _rows(sin)

    def _angles(
        self, positions: Tensor, length: int | None, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no wider dtype
        angles = positions.to(device, wide)[..., None] * self.frequencies(length).to(device, wide)  # [..., T, dim / 2]
        factor = _constant(self.attention_factor).to(device, wide)
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _constant(number: float) -> Tensor:
    """Return a number as a tensor, float64 []: an export to ONNX rounds plain numbers of a graph to float32."""
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def _most(positions: Tensor) -> int:
    """Return the largest position; -1 without positions."""
    return int(positions.max()) if positions.numel() else -1


def _rows(x: Tensor) -> Tensor:
    """Return [T, dim / 2] unchanged; [B, T, dim / 2] as [B, 1, T, dim / 2]: the same for all heads."""
    return x if x.ndim == 2 else x[:, None]


_tables: BoundedTable[tuple[Rotary, torch.device, torch.dtype], tuple[Tensor, Tensor]] = BoundedTable(16)
FAR_APART, FREE = 4, 4096  # a table covers positions up to 4 times their number + 4096


def _has(rotary: Rotary, length: int, device: torch.device, dtype: torch.dtype) -> bool:
    table = _tables.get((rotary, device, dtype))
    return table is not None and len(table[0]) >= length


def _table(rotary: Rotary, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions 0 to at least ``length``, [length, dim / 2]; cached for later calls."""
    key = (rotary, device, dtype)
    table = _tables.get(key)
    if table is None or len(table[0]) < length:
        with torch.inference_mode(False), torch.no_grad():  # a later call may require gradients through them
            positions = torch.arange(1 << max(8, (length - 1).bit_length()), device=device)
            table = rotary._angles(positions, None, device, dtype)
        _tables.add(key, table)
    return table


def _places(positions: object, x: Tensor) -> Places:
    """Return ``check_positions``, or an equivalent slice."""
    if not isinstance(positions, slice):
        return check_positions(positions, x)
    start, stop, length = 0 if positions.start is None else positions.start, positions.stop, x.shape[-2]
    whole = all(isinstance(end, (int, torch.SymInt)) and not isinstance(end, bool) for end in (start, stop))
    if not whole or positions.step not in (None, 1) or start < 0 or stop - start != length:
        raise ValueError(f"positions: got {positions}, expected {length} (T) of 0, 1, 2, …; {shapes(x=x)}")
    return slice(start, stop)


def check_positions(positions: object, x: Tensor) -> Tensor:
    """Return the positions of x [B, H, T, D] or [H, T, D] as int64; raise if they do not fit."""
    length = x.shape[-2]
    places = to_positions("positions", positions, "[T] or [B, T]")
    fits = places.ndim in (1, x.ndim - 2) and places.shape[-1] == length
    if not fits or (places.ndim == 2 and places.shape[0] != 1 and places.shape[0] != x.shape[0]):
        text = f"[{length}]" + (f" or [{x.shape[0]}, {length}]" if x.ndim == 4 else "")
        raise ValueError(f"positions: {shapes(positions=places)}, expected {text}")
    return places


Rotary.__module__ = "headscope.positions"  # its public path
