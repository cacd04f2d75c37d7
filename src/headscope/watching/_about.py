"""The origin and options of a recording."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from headscope import __version__
from headscope._intercept import Choice, Kind, model_class, origin_of
from headscope.stats import Observe
from headscope.stats._origin import Origin, Part
from headscope.watching._options import Options
from headscope.watching._verify import Verified

_MEASURED = tuple(each.name for each in fields(Observe))
_WATCHED = ("every", "kinds", "positions", "accelerate", "verify")
_SCALARS = frozenset((bool, int, float, str, type(None)))


@dataclass(frozen=True)
class About:
    """The origin and options of a recording.

    Attributes:
        model: its class, and the name under which it was loaded, if known.
        options: the arguments of ``watch``, as text or numbers.
        versions: of headscope, torch and, if loaded, transformers.
        kinds: layer -> "self" or "cross".
        texts: the text of each token, or None.
        forwards: the number of observed forward passes.
        ran: the number of all forward passes.
        origin: class and configuration of the model, widths and part of the heads of each layer; None = not stated.
        verified: layer -> the errors of some rows against float64, if the model was watched with ``verify``.
        other_layers: layer -> what it is, for layers that mix tokens without a softmax over keys.
        run_texts: the text of each token of each forward pass, where ``headscope watch`` reads a text in windows.

    Examples:
        >>> import torch
        >>> from headscope import watch
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> with watch(model) as recording:
        ...     output = model(torch.zeros(1, 4, 8))
        >>> recording.about.model, recording.about.kinds
        ('TransformerEncoderLayer', {'self_attn': 'self'})
    """

    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    texts: tuple[str, ...] | None = None
    forwards: int = 0
    ran: int = 0
    origin: Origin | None = None
    verified: Mapping[str, Verified] = field(default_factory=dict[str, Verified])
    other_layers: Mapping[str, str] = field(default_factory=dict[str, str])
    run_texts: tuple[tuple[str, ...], ...] = ()

    @property
    def part(self) -> Mapping[str, Part]:
        """Layer -> the recorded part of its heads; layers with all heads are not listed."""
        return {} if self.origin is None else self.origin.part


About.__module__ = "headscope.watching"  # its public path


def about_of(model: nn.Module, options: Options, layers: Choice | None, texts: tuple[str, ...] | None) -> About:
    """Return the origin and options of a recording of ``model``, before the first forward pass."""
    loaded = getattr(getattr(model, "config", None), "_name_or_path", "")
    name = model_class(model).__name__ + (f" ({loaded})" if loaded else "")
    what = options.what
    entries: dict[str, Any] = {name: _plain(getattr(what, name)) for name in _MEASURED}
    entries |= {name: _plain(getattr(options, name)) for name in _WATCHED}
    entries |= {"tokens": _plain(options.tokens) or entries["tokens"], "layers": _plain(layers)}
    entries["weights"] = _plain(options.weights) or entries["weights"]
    versions = {"headscope": __version__, "torch": torch.__version__}
    if "transformers" in sys.modules:
        versions["transformers"] = sys.modules["transformers"].__version__
    return About(name, entries, versions, {}, texts, origin=origin_of(model))


def _plain(value: Any) -> Any:
    """Return an option in JSON form; a tensor or a function by its kind."""
    if type(value) in _SCALARS or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return type(value).__name__
