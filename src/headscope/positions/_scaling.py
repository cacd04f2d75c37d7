"""Scalings of rotary, which extend the trained range of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from headscope.positions._options import settle_number, settle_whole


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor``: a context ``factor`` times as long uses the trained range of angles.

    Args:
        factor: at least 1.

    Source: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation".

    Examples:
        >>> from headscope import positions
        >>> positions.Rotary(4, scaling=positions.LinearScaling(2.0)).frequencies()  # without scaling 1 and 0.01
        tensor([0.5000, 0.0050], dtype=torch.float64)
    """

    factor: float

    def __post_init__(self) -> None:
        settle_number(self, "factor", least=1)


@dataclass(frozen=True)
class NTK:
    """A larger base: fast pairs rotate as trained, slow ones up to ``factor`` times as slowly.

    Args:
        factor: at least 1.
        original_length: None = the base grows once and for all, to base · factor ** (dim / (dim - 2)). A number: the
            base grows with the length of each call that is longer than this ("dynamic" in transformers), so the angles
            of a token change as more follow; a cache does not support that.

    Source: bloc97 2023, "NTK-Aware Scaled RoPE"; Peng et al. 2023, "YaRN", section 3.

    Examples:
        >>> from headscope import positions
        >>> positions.Rotary(4, scaling=positions.NTK(2.0)).frequencies()  # without scaling 1 and 0.01
        tensor([1.0000, 0.0050], dtype=torch.float64)
    """

    factor: float
    original_length: int | None = None

    def __post_init__(self) -> None:
        settle_number(self, "factor", least=1)
        if self.original_length is not None:
            settle_whole(self, "original_length")


@dataclass(frozen=True)
class YaRN:
    """Slow pairs interpolated, fast pairs unchanged, with a ramp between; q and k scaled by the attention factor.

    Args:
        factor: the extended context length over the trained one, at least 1.
        original_length: of the texts that the model was trained on.
        beta_fast: pairs with more turns than this over ``original_length`` do not change.
        beta_slow: pairs with fewer turns are interpolated.
        attention_factor: the factor of cos and sin, above 0; by default 0.1 ln(factor) + 1, or, with ``mscale`` and
            ``mscale_all_dim``, (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), as in DeepSeek.
        mscale, mscale_all_dim: numbers above 0 in the default of ``attention_factor``; both or none.
        truncate: round the ends of the ramp to whole pairs, outwards.

    Source: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", equations 17 to 22.

    Examples:
        >>> from headscope import positions
        >>> rotary = positions.Rotary(4, scaling=positions.YaRN(2.0, original_length=64))
        >>> rotary.frequencies()  # without scaling 1 and 0.01
        tensor([1.0000, 0.0050], dtype=torch.float64)
        >>> round(rotary.attention_factor, 3)
        1.069
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
        settle_number(self, "factor", least=1)
        settle_whole(self, "original_length")
        for name in ("beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                settle_number(self, name, above=0)
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast: got {self.beta_fast}, expected more than beta_slow, {self.beta_slow}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(f"mscale, mscale_all_dim: got {self.mscale}, {self.mscale_all_dim}, expected both or none")


@dataclass(frozen=True)
class Llama3:
    """Pairs of long wavelength slowed by ``factor``, those of short wavelength unchanged, with a ramp between.

    Args:
        factor: at least 1.
        low_freq_factor: wavelengths above original_length / low_freq_factor are slowed.
        high_freq_factor: those below original_length / high_freq_factor do not change; above ``low_freq_factor``.
        original_length: of the texts that the model was trained on.

    Source: Llama 3.1 (Grattafiori et al. 2024, "The Llama 3 Herd of Models"), ``apply_scaling`` of its reference code.

    Examples:
        >>> from headscope import positions
        >>> scaling = positions.Llama3(factor=2.0, original_length=64)
        >>> positions.Rotary(4, scaling=scaling).frequencies()  # without scaling 1 and 0.01
        tensor([1.0000, 0.0050], dtype=torch.float64)
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        settle_number(self, "factor", least=1)
        settle_number(self, "low_freq_factor", above=0)
        settle_number(self, "high_freq_factor", above=0)
        settle_whole(self, "original_length")
        if self.high_freq_factor <= self.low_freq_factor:
            got = f"{self.high_freq_factor}, expected more than low_freq_factor, {self.low_freq_factor}"
            raise ValueError(f"high_freq_factor: got {got}")


Scaling: TypeAlias = "LinearScaling | NTK | YaRN | Llama3"


for _class in (LinearScaling, NTK, YaRN, Llama3):
    _class.__module__ = "headscope.positions"  # their public path
