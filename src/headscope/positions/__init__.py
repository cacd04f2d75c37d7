"""Where tokens stand: rotary embedding with its scalings, ALiBi, and T5's learned bias by distance.

``MultiHeadAttention(rotary=..., position_bias=...)`` takes what is made here; each also works by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from headscope._support.arguments import kind, number, shapes, whole
from headscope._support.torch_state import is_traced

__all__ = [
    "NTK",
    "ALiBi",
    "LinearScaling",
    "Llama3",
    "RelativeBias",
    "Rotary",
    "T5Buckets",
    "YaRN",
    "matrix",
    "restarting",
]

Places: TypeAlias = "Tensor | slice"
"""Positions: integers [T] or [B, T]; or a slice of 0, 1, 2, …"""


# ---------------------------------------------------------------- scalings of rotary


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor``: a context that many times as long turns through the trained angles.

    Args:
        factor: at least 1.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation".
    """

    factor: float

    def __post_init__(self) -> None:
        _settle(self, "factor", least=1)


@dataclass(frozen=True)
class NTK:
    """A larger base: fast pairs turn as they were trained, slow ones up to ``factor`` times as slowly.

    Args:
        factor: at least 1.
        original_length: None = the base grows once and for all, to base · factor ** (dim / (dim - 2)). A number: the
            base grows with the length of each call that is longer than this ("dynamic" in transformers), so that the
            angles of a token change as more follow it; a cache refuses that.

    Source: bloc97 2023, "NTK-Aware Scaled RoPE"; Peng et al. 2023, "YaRN", section 3.
    """

    factor: float
    original_length: int | None = None

    def __post_init__(self) -> None:
        _settle(self, "factor", least=1)
        if self.original_length is not None:
            _settle_whole(self, "original_length")


@dataclass(frozen=True)
class YaRN:
    """Slow pairs interpolated, fast ones left as they are, with a ramp between; q and k grow by the attention factor.

    Args:
        factor: how many times as long the context is to be, at least 1.
        original_length: of the texts that the model was trained on.
        beta_fast: pairs that turn more often than this over ``original_length`` stay as they are.
        beta_slow: pairs that turn less often are interpolated.
        attention_factor: what cos and sin are multiplied by, above 0; by default 0.1 ln(factor) + 1, or, with both of
            the next two, (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), as DeepSeek has it.
        mscale, mscale_all_dim: see there; both or none.
        truncate: round the ends of the ramp to whole pairs, outwards.

    Source: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", equations 17 to 22.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _settle(self, "factor", least=1)
        _settle_whole(self, "original_length")
        for name in ("beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _settle(self, name, above=0)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast: got {self.beta_fast}, wanted more than beta_slow, {self.beta_slow}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(f"mscale, mscale_all_dim: got {self.mscale}, {self.mscale_all_dim}, wanted both or none")


@dataclass(frozen=True)
class Llama3:
    """Pairs of long wavelength slowed by ``factor``, those of short wavelength left, with a ramp between.

    Args:
        factor: at least 1.
        low_freq_factor: wavelengths above original_length / low_freq_factor are slowed.
        high_freq_factor: those below original_length / high_freq_factor stay; above ``low_freq_factor``.
        original_length: of the texts that the model was trained on.

    Source: Llama 3.1 (Grattafiori et al. 2024, "The Llama 3 Herd of Models"), ``apply_scaling`` of its reference code.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _settle(self, "factor", least=1)
        _settle(self, "low_freq_factor", above=0)
        _settle(self, "high_freq_factor", above=0)
        _settle_whole(self, "original_length")
        if self.high_freq_factor <= self.low_freq_factor:
            got = f"{self.high_freq_factor}, wanted more than low_freq_factor, {self.low_freq_factor}"
            raise ValueError(f"high_freq_factor: got {got}")


Scaling: TypeAlias = "LinearScaling | NTK | YaRN | Llama3"


# ---------------------------------------------------------------- rotary


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: pairs of a head's numbers, turned by position · frequency.

    Pair n turns by m · base ** (-2n / dim) at position m, in q and in k, so that q·k depends on the distance alone.
    Angles are computed in float64, the turn itself in float32 or better.

    Args:
        dim: how many numbers of each head are turned, from the first one on: even, at most the head's width; the rest
            stays as it is (partial rotary).
        base: of the frequencies, above 1.
        pairing: which numbers make a pair: "half": n and n + dim / 2 (Hugging Face, GPT-NeoX); "interleaved": 2n and
            2n + 1 (the paper, GPT-J, Llama's own weights).
        scaling: ``LinearScaling``, ``NTK``, ``YaRN``, ``Llama3``, or None.

    Raises:
        TypeError, ValueError: a value of the wrong kind or out of range.

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", equation 34.
    """

    dim: int
    base: float = 10000.0
    pairing: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _settle_whole(self, "dim")
        if self.dim % 2:
            raise ValueError(f"dim: got {self.dim}, wanted an even number: rotary turns pairs")
        _settle(self, "base", above=1)
        if self.pairing not in ("half", "interleaved"):
            raise ValueError(f'pairing: got {self.pairing!r}, wanted "half" or "interleaved"')
        if self.scaling is not None and not isinstance(self.scaling, (LinearScaling, NTK, YaRN, Llama3)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"scaling: got {kind(self.scaling)}, wanted LinearScaling, NTK, YaRN, Llama3 or None")
        if isinstance(self.scaling, NTK) and self.dim < 4:
            raise ValueError(f"dim: got {self.dim}, wanted at least 4 for NTK, whose exponent is dim / (dim - 2)")

    @property
    def dynamic(self) -> bool:
        """Whether the frequencies depend on the length of the call."""
        return isinstance(self.scaling, NTK) and self.scaling.original_length is not None

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by: 1, but for YaRN."""
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
        """The angle of each pair at position 1, float64 [dim / 2].

        Args:
            length: of the call, for ``NTK(original_length=...)``; by default no more than that.
        """
        powers = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu") / self.dim  # [dim / 2]
        plain = self.base**-powers
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return plain / factor
            case NTK(factor, original):
                if original is not None:
                    factor = factor * max(length or 0, original) / original - (factor - 1)
                return (self.base * factor ** (self.dim / (self.dim - 2))) ** -powers
            case YaRN():
                kept = self._yarn_kept(self.scaling)
                return plain / self.scaling.factor * (1 - kept) + plain * kept
            case Llama3(factor, low, high, original):
                turns = original * plain / (2 * math.pi)  # over the trained length
                return plain * torch.lerp(torch.full_like(plain, 1 / factor), torch.ones_like(plain),
                                          ((turns - low) / (high - low)).clamp(0, 1))  # fmt: skip

    def _yarn_kept(self, yarn: YaRN) -> Tensor:
        """How much of each pair's frequency stays: 1 for fast ones, 0 for slow ones."""

        def pair(turns: float) -> float:
            """The pair that turns so often over the trained length."""
            return self.dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high = high + 0.001 if low == high else high
        at = torch.arange(self.dim // 2, dtype=torch.float64, device="cpu")
        return 1 - ((at - low) / (high - low)).clamp(0, 1)

    def rotate(self, x: Tensor, positions: Places, *, length: int | None = None) -> Tensor:
        """Turn queries or keys to their positions; the result has x's shape and dtype.

        Args:
            x: [B, H, T, D] or [H, T, D], D at least ``dim``.
            positions: where each stands: integers [T] or [B, T]; or a slice of 0, 1, 2, …, with T in it.
            length: of the call, for ``NTK(original_length=...)``; by default one more than the largest position.

        Raises:
            TypeError, ValueError: a width, or positions, that do not fit.
        """
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"x: axis {x.ndim - 1} (D) is {x.shape[-1]}, wanted at least dim {self.dim}; {shapes(x=x)}"
            )
        return self.turn(x, *self.shared_cos_sin(_places(positions, x), x, length))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``rotate`` by what ``cos_sin`` gave: x [..., T, D], cos and sin [T, dim / 2] or [B, 1, T, dim / 2]."""
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
        """What ``turn`` takes, in float32 (float64 for float64), on the device of ``like``."""
        cos, sin = self.shared_cos_sin(positions, like, length)
        return cos.clone(), sin.clone()

    def shared_cos_sin(self, positions: Places, like: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """``cos_sin`` that must not be written to: it may be a piece of a table that later calls read."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if self.dynamic and length is None:
            length = positions.stop if isinstance(positions, slice) else _most(positions) + 1
        if not self.dynamic and not is_traced() and like.device.type != "meta":
            if isinstance(positions, slice):
                cos, sin = _table(self, positions.stop, like.device, dtype)
                return cos[positions], sin[positions]
            if positions.device.type == "cpu" and positions.numel():
                least, most = (int(each) for each in positions.aminmax())
                sparse = most + 1 > FAR_APART * positions.numel() + FREE  # no table is made for those
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
        wide = torch.float32 if device.type == "mps" else torch.float64  # which has nothing wider
        angles = positions.to(device, wide)[..., None] * self.frequencies(length).to(device, wide)  # [..., T, dim / 2]
        factor = self.attention_factor
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _most(positions: Tensor) -> int:
    """The largest position; -1 if there is none."""
    return int(positions.max()) if positions.numel() else -1


def _rows(x: Tensor) -> Tensor:
    """[T, dim / 2] as it is; [B, T, dim / 2] -> [B, 1, T, dim / 2]: the same for all heads."""
    return x if x.ndim == 2 else x[:, None]


_tables: dict[tuple[Rotary, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
_TABLES = 16
FAR_APART, FREE = 4, 4096  # a table is made for positions up to 4 times their number + 4096


def _has(rotary: Rotary, length: int, device: torch.device, dtype: torch.dtype) -> bool:
    found = _tables.get((rotary, device, dtype))
    return found is not None and len(found[0]) >= length


def _table(rotary: Rotary, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions from 0 to ``length`` at least, [length, dim / 2]; kept for the calls that follow."""
    key = (rotary, device, dtype)
    found = _tables.get(key)
    if found is None or len(found[0]) < length:
        if len(_tables) >= _TABLES:
            _tables.clear()
        with torch.inference_mode(False), torch.no_grad():  # a later call may want gradients through them
            positions = torch.arange(1 << max(8, (length - 1).bit_length()), device=device)
            found = rotary._angles(positions, None, device, dtype)
        _tables[key] = found
    return found


# ---------------------------------------------------------------- biases by distance


@dataclass(frozen=True)
class ALiBi:
    """Attention with linear biases: the logit falls by slope_h · distance, in both directions.

    Args:
        num_heads: H, at least 1.
        slopes: one a head, at least 0; by default the paper's, 2 ** (-8 (h + 1) / H) where H is a power of two; else
            those of the power of two below, then every other one of the power above.

    Source: Press et al. 2021, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
    Extrapolation".
    """

    num_heads: int
    slopes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _settle_whole(self, "num_heads")
        slopes = _numbers("slopes", self.slopes) or _slopes(self.num_heads)
        if len(slopes) != self.num_heads:
            raise ValueError(f"slopes: got {len(slopes)}, wanted one a head, {self.num_heads}")
        for slope in slopes:
            _check("slopes", slope, least=0)
        object.__setattr__(self, "slopes", slopes)

    def of(self, distances: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The bias at signed distances, key minus query, [...] -> [..., H]."""
        slopes = torch.tensor(self.slopes, dtype=dtype, device=distances.device)
        return -distances.abs().to(dtype)[..., None] * slopes


def _slopes(heads: int) -> tuple[float, ...]:
    below = 1 << (heads.bit_length() - 1)  # the largest power of two in it
    first = [2.0 ** (-8 * (n + 1) / below) for n in range(below)]
    between = [2.0 ** (-4 * (n + 1) / below) for n in range(0, 2 * below, 2)]
    return tuple((first + between)[:heads])


@dataclass(frozen=True)
class T5Buckets:
    """T5's buckets of distance: one for each short distance, then ever wider ones.

    Args:
        num_buckets: how many there are in all, even and at least 4 if ``bidirectional``, else at least 2.
        max_distance: from here on all distances share one bucket; more than the distances with a bucket of their own.
        bidirectional: half of the buckets are for keys after the query; otherwise those share the bucket of distance 0.

    Source: Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
    section 2.1.
    """

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        _settle_whole(self, "num_buckets")
        _settle_whole(self, "max_distance")
        least = 4 if self.bidirectional else 2
        if self.num_buckets < least or (self.bidirectional and self.num_buckets % 2):
            wanted = "an even number from 4" if self.bidirectional else "at least 2"
            raise ValueError(f"num_buckets: got {self.num_buckets}, wanted {wanted}")
        if self.max_distance <= self.exact:
            raise ValueError(f"max_distance: got {self.max_distance}, wanted more than {self.exact}")

    @property
    def exact(self) -> int:
        """How many distances, from 0 on, have a bucket of their own in each direction."""
        return self.num_buckets // (4 if self.bidirectional else 2)

    def of(self, distances: Tensor) -> Tensor:
        """The bucket of each signed distance, key minus query; integers of the same shape."""
        half = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        ahead = (distances > 0).long() * half if self.bidirectional else 0
        far = distances.abs() if self.bidirectional else (-distances).clamp(min=0)
        # float32, step by step as T5 has it: learned tables go with its rounding at the edges of the buckets
        wide = torch.log(far.float() / self.exact) / math.log(self.max_distance / self.exact) * (half - self.exact)
        wide = torch.where(far < self.exact, 0, wide).long() + self.exact
        return ahead + torch.where(far < self.exact, far, wide.clamp(max=half - 1))


class RelativeBias(nn.Module):
    """A learned bias for each bucket of distance and each head, as in T5. Layers may share one.

    Parameters: ``weight`` [num_buckets, H], zero at the start; it has the shape and order of
    ``relative_attention_bias.weight`` in transformers' T5.

    Args:
        num_heads: H, at least 1.
        buckets: which distances share a bias.
        device, dtype: of the table.
    """

    def __init__(
        self, num_heads: int, buckets: T5Buckets | None = None, *, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        num_heads = whole("num_heads", num_heads)
        if buckets is not None and not isinstance(buckets, T5Buckets):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"buckets: got {kind(buckets)}, wanted T5Buckets")
        self.num_heads = num_heads
        self.buckets = T5Buckets() if buckets is None else buckets
        self.weight = nn.Parameter(torch.empty(self.buckets.num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew, at no bias."""
        nn.init.zeros_(self.weight)

    def of(self, distances: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The bias at signed distances, key minus query, [...] -> [..., H]."""
        return self.weight[self.buckets.of(distances)].to(dtype)

    def forward(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """The bias of queries and keys at these positions, [Q] and [K] -> [H, Q, K], or with B before them."""
        return matrix(self, q_pos, k_pos)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.num_heads}, {self.buckets}"


PositionBias: TypeAlias = "ALiBi | RelativeBias"


def matrix(bias: PositionBias, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A bias by distance as ``attention`` takes it.

    Shapes: q_pos [Q] and k_pos [K] -> [H, Q, K]; q_pos [B, Q] and k_pos [B, K] -> [B, H, Q, K].

    Raises:
        TypeError: positions that are no integers.
        ValueError: their axes do not fit.
    """
    q_pos, k_pos = _integers("q_pos", q_pos, "[Q] or [B, Q]"), _integers("k_pos", k_pos, "[K] or [B, K]")
    both = q_pos.ndim == k_pos.ndim == 2
    apart = both and q_pos.shape[0] != 1 and k_pos.shape[0] != 1 and q_pos.shape[0] != k_pos.shape[0]
    if q_pos.ndim not in (1, 2) or k_pos.ndim not in (1, 2) or apart:
        raise ValueError(
            f"k_pos: {shapes(q_pos=q_pos, k_pos=k_pos)}, wanted q_pos [Q] and k_pos [K], or [B, Q] and [B, K]"
        )
    between = k_pos[..., None, :] - q_pos[..., None]  # [..., Q, K]
    return bias.of(between, dtype).movedim(-1, -3)  # [..., H, Q, K]


def turned_matrix(bias: PositionBias, queries: int, keys: int, first: int, like: Tensor) -> Tensor:
    """``matrix`` for queries that come last first, [H, Q, K]: a view of H x (Q + K - 1) numbers.

    Query i of the result stands at first + queries - 1 - i, key j at j: the distance depends on i + j alone, so that
    each row is the one before it, one number further on. (In their usual order it depends on j - i, and a tensor's
    strides cannot be negative.)
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distances = torch.arange(queries + keys - 1, device=like.device) - (first + queries - 1)
    table = bias.of(distances, dtype).T.contiguous()  # [H, Q + K - 1]
    return table.as_strided((len(table), queries, keys), (table.shape[1], 1, 1))


def restarting(cu_seqlens: Tensor) -> Tensor:
    """Positions of packed sequences, from 0 in each: cumulative lengths 0, 3, 5 -> 0, 1, 2, 0, 1; integers [total].

    Raises:
        TypeError: they are no tensor of integers.
        ValueError: they do not begin with 0, or fall.
    """
    cu_seqlens = _integers("cu_seqlens", cu_seqlens, "[n + 1]")
    if cu_seqlens.ndim != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens: {shapes(cu_seqlens=cu_seqlens)}, wanted [n + 1]")
    if cu_seqlens.device.type != "meta" and not is_traced():
        offsets: list[int] = cu_seqlens.tolist()
        if offsets[0] or offsets != sorted(offsets):
            raise ValueError(f"cu_seqlens: got {offsets}, wanted numbers from 0 on that do not fall")
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())  # [total]
    return torch.arange(len(starts), device=starts.device) - starts


# ---------------------------------------------------------------- checks


def _places(positions: object, x: Tensor) -> Places:
    """``check_positions``, for which a slice will do as well."""
    if not isinstance(positions, slice):
        return check_positions(positions, x)
    start, stop, length = 0 if positions.start is None else positions.start, positions.stop, x.shape[-2]
    whole = all(isinstance(end, (int, torch.SymInt)) and not isinstance(end, bool) for end in (start, stop))
    if not whole or positions.step not in (None, 1) or start < 0 or stop - start != length:
        raise ValueError(f"positions: got {positions}, wanted {length} (T) of 0, 1, 2, …; {shapes(x=x)}")
    return slice(start, stop)


def check_positions(positions: object, x: Tensor) -> Tensor:
    """Positions of x [B, H, T, D] or [H, T, D] as int64, if they fit it."""
    length = x.shape[-2]
    places = _integers("positions", positions, "[T] or [B, T]")
    fits = places.ndim in (1, x.ndim - 2) and places.shape[-1] == length
    if not fits or (places.ndim == 2 and places.shape[0] != 1 and places.shape[0] != x.shape[0]):
        text = f"[{length}]" + (f" or [{x.shape[0]}, {length}]" if x.ndim == 4 else "")
        raise ValueError(f"positions: {shapes(positions=places)}, wanted {text}")
    return places


def _integers(name: str, x: object, axes: str) -> Tensor:
    """A tensor of any integer dtype as int64: small ones wrap, and uint8 picks like a mask."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name}: got {kind(x)}, wanted integers {axes}")
    return x.long()


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {values!r}, wanted numbers") from None


def _settle_whole(options: object, name: str) -> None:
    """One of the frozen options as a whole number from 1."""
    object.__setattr__(options, name, whole(name, getattr(options, name)))


def _settle(options: object, name: str, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """One of the frozen options as a finite number."""
    found = number(name, getattr(options, name))
    _check(name, found, least=least, above=above)
    object.__setattr__(options, name, found)


def _check(name: str, value: float, *, least: float = -math.inf, above: float = -math.inf) -> None:
    if not (least <= value < math.inf and value > above):
        wanted = f"a finite number above {above}" if above > -math.inf else f"a finite number from {least}"
        raise ValueError(f"{name}: got {value}, wanted {wanted}")


def bias_of(option: object, num_heads: int, made: dict[str, Any]) -> PositionBias | None:
    """What ``MultiHeadAttention(position_bias=...)`` keeps; ``T5Buckets`` get a table of their own.

    Raises:
        TypeError: something else.
        ValueError: it has another number of heads.
    """
    if option is None:
        return None
    if isinstance(option, T5Buckets):
        return RelativeBias(num_heads, option, **made)
    if not isinstance(option, (ALiBi, RelativeBias)):
        got = f"the class {option.__name__}" if isinstance(option, type) else kind(option)
        raise TypeError(f"position_bias: got {got}, wanted ALiBi, T5Buckets, RelativeBias or None")
    if option.num_heads != num_heads:
        raise ValueError(f"position_bias: has {option.num_heads} heads, wanted num_heads {num_heads}")
    return option
