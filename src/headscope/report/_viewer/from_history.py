"""The content of the page of a training's history: the values of all heads, step by step.

Blocks follow each other as in ``packing.py``: compressed (raw deflate), each at a multiple of three bytes. A quantity
has one block for each layer, [heads, columns], with a column for every ``stride``-th step:

    bits 32    float32
    bits 8     the difference of each code from that of the column before, modulo 256. A code c from 0 to 252 stands for
               u = low + (high - low) * c / 252; 253 = -infinity, 254 = infinity, 255 = none

The value is u on a linear scale, and pivot * sinh(u) on the scale "asinh". Colours and axes use the same u, from
``low`` to ``high``. The block of a band is float32 [5, steps]: minimum, 10 %, median, 90 % and maximum over all heads.
"""

from __future__ import annotations

import base64
import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headscope.report._viewer import texts
from headscope.report._viewer.from_recording import list_options, short_layers
from headscope.report._viewer.model import PackedHistory, Shown

Array = NDArray[Any]

MOST_BYTES = 16 * 2**20
"""The most bytes of all blocks, before base64."""

EXACT_VALUES = 2**21
"""The most values that a page holds in float32; pages with more use 8 bits."""

MOST_ALARMS = 20_000
CODES, NEGATIVE, POSITIVE, NOTHING = 252, 253, 254, 255
FIRST = ("normalized_entropy", "entropy", "max_logit_max", "first")
IMPORTANT = 8  # how much more room each of these may take than another quantity
LIMITS = {"normalized_entropy": "entropy", "max_logit_max": "max_logit", "first": "sink"}
OF_ALARM = {"entropy collapse": "normalized_entropy", "growing logits": "max_logit_max", "rising sink": "first"}
SAME = 1e-6  # relative: the history has float32
SPREAD = 30.0  # a largest value of so many times the median has the scale asinh


class RaisedAlarm(Protocol):
    """An alarm of a history."""

    @property
    def step(self) -> int: ...
    @property
    def layer(self) -> str: ...
    @property
    def head(self) -> int: ...
    @property
    def what(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def limit(self) -> float: ...
    @property
    def reference(self) -> float: ...


class AlarmLimits(Protocol):
    """The limits of the alarms; None = never."""

    @property
    def entropy(self) -> float | None: ...
    @property
    def max_logit(self) -> float | None: ...
    @property
    def sink(self) -> float | None: ...


class About(Protocol):
    """What a history is of."""

    @property
    def model(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def versions(self) -> Mapping[str, str]: ...
    @property
    def kinds(self) -> Mapping[str, str]: ...
    @property
    def forwards(self) -> int: ...
    @property
    def ran(self) -> int: ...


class TrainingHistory(Protocol):
    """The history of a training.

    Examples:
        >>> import torch
        >>> from headscope import History, MultiHeadAttention, watch
        >>> from headscope.report.viewer import TrainingHistory
        >>> model, history = MultiHeadAttention(8, 2), History("run.safetensors")
        >>> with watch(model, log=history):
        ...     _ = model(torch.randn(1, 4, 8))
        >>> shown: TrainingHistory = history
        >>> shown.steps, shown.observed, dict(shown.heads)
        ((0,), 1, {'MultiHeadAttention': 2})
    """

    @property
    def about(self) -> About:
        """What the history is of."""
        ...

    @property
    def limits(self) -> AlarmLimits | None:
        """The limits of the alarms."""
        ...

    @property
    def steps(self) -> Sequence[int]:
        """The stored steps."""
        ...

    @property
    def observed(self) -> int:
        """The number of observed steps."""
        ...

    @property
    def starts(self) -> Sequence[int]:
        """The first step of each watch."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The quantities."""
        ...

    @property
    def heads(self) -> Mapping[str, int]:
        """Layer -> its number of heads."""
        ...

    @property
    def alarms(self) -> Sequence[RaisedAlarm]:
        """All alarms."""
        ...

    def __getitem__(self, at: str) -> Tensor:
        """Return a quantity, [steps, layers, heads]."""
        ...


def shown(history: TrainingHistory, title: str = "") -> Shown:
    """Return what the page of a history shows, see ``render_history``.

    Raises:
        ValueError: the history has no step yet.
    """
    if not history.steps:
        raise ValueError("history: has no step yet; run the model inside `with watch(model, log=history):`")
    steps, heads = len(history.steps), sum(history.heads.values())
    short, common = short_layers([*history.heads])
    layers = [
        {"name": name, "short": short[name], "heads": count, "kind": history.about.kinds.get(name, "self")}
        for name, count in history.heads.items()
    ]
    packed = _Packed(history)
    notes = [texts.thinned(steps, history.observed)] if steps < history.observed else []
    if packed.coarse:
        notes.append(texts.coarse_quantities([*packed.coarse], len(history.names), min(packed.coarse.values())))
    if len(history.alarms) > MOST_ALARMS:
        notes.append(texts.alarms_left_out(MOST_ALARMS, len(history.alarms)))
    return Shown(
        title=title or history.about.model,
        layers=(),
        names=[],
        texts=None,
        footer=_footer(history, common),
        lead=texts.lead_of_history(steps, len(layers), heads),
        notes=notes,
        opens_on=packed.opens_on,
        history=PackedHistory(layers, packed.description, packed.content),
    )


def _footer(history: TrainingHistory, common: str) -> dict[str, str]:
    about, limits = history.about, history.limits
    options = list_options(about.options)
    watches = len(history.starts)
    limit_texts = texts.NO_ALARMS
    if limits is not None:
        limit_texts = texts.alarm_limits(limits.entropy, limits.max_logit, limits.sink)
    return {
        texts.MODEL: about.model or texts.NO_NAME,
        texts.STEPS_OBSERVED: texts.steps_of(history.steps, about.forwards, about.ran, watches),
        texts.ALARMS: limit_texts,
        **({texts.LAYERS: common.strip().removeprefix("Layers: ").removesuffix(".")} if common else {}),
        **({texts.OPTIONS: options} if options else {}),
        texts.VERSIONS: ", ".join(f"{name} {version}" for name, version in about.versions.items()) or texts.NO_VERSIONS,
    }


@dataclass(frozen=True)
class Scale:
    """How a quantity maps to the colours, axes and codes of the page; see above."""

    asinh: bool
    pivot: float
    low: float
    high: float

    @staticmethod
    def of(values: Array) -> Scale:
        """Return the scale of all values of a quantity; that of values from 0 on begins at 0."""
        known = values[np.isfinite(values)].astype(np.float64)
        if not known.size:
            return Scale(False, 1.0, 0.0, 1.0)
        size = np.abs(known)
        median = float(np.median(size[size > 0])) if bool((size > 0).any()) else 1.0
        asinh = float(size.max()) > SPREAD * median
        scale = Scale(asinh, median, 0.0, 1.0)
        low, high = (float(scale.place(np.array(x))) for x in (min(0.0, known.min()), known.max()))
        return Scale(asinh, median, low, high if high > low else low + 1.0)

    def place(self, values: Array) -> Array:
        """Return the u of values."""
        wide = values.astype(np.float64)
        return np.arcsinh(wide / self.pivot) if self.asinh else wide

    def codes(self, values: Array) -> Array:
        """Return the codes of values, uint8."""
        share = (self.place(values) - self.low) / (self.high - self.low)
        codes = np.rint(np.nan_to_num(share, nan=0.0, posinf=0.0, neginf=0.0).clip(0, 1) * CODES).astype(np.uint8)
        special = {NEGATIVE: np.isneginf(values), POSITIVE: np.isposinf(values), NOTHING: np.isnan(values)}
        for code, which in special.items():
            codes[which] = code
        return codes

    def description(self) -> dict[str, Any]:
        return {"scale": "asinh" if self.asinh else "linear", "pivot": self.pivot, "low": self.low, "high": self.high}


class _Packed:
    """The blocks of a history, and how the page reads them.

    Attributes:
        description: see ``PackedHistory``.
        coarse: heading of each quantity that the page does not hold at every step -> its stride.
        opens_on: the layer and head of the first alarm, or with the largest change.
    """

    def __init__(self, history: TrainingHistory) -> None:
        self._content = bytearray()
        self.coarse: dict[str, int] = {}
        heads = [*history.heads.values()]
        names = [name for name in FIRST if name in history.names]
        names += [name for name in history.names if name not in names]
        exact = len(history.steps) * sum(heads) * len(names) <= EXACT_VALUES
        alarms = _alarms(history)
        bands = [name for name in (*FIRST[:2], "max_logit_max") if name in names]
        bands = bands[1:] if bands[:2] == [*FIRST[:2]] else bands  # entropy is drawn once
        bands = ["normalized_entropy", *bands[1:]] if "normalized_entropy" in names else bands
        first = min(alarms, key=lambda alarm: alarm[3], default=None)  # the most serious kind, then the first step
        self.opens_on = (first[1], first[2]) if first else None
        quantities: list[dict[str, Any]] = []
        packed_bands: list[dict[str, Any]] = []
        for at, name in enumerate(names):
            values = np.moveaxis(history[name].numpy(), 0, -1)  # [layers, heads, steps]
            rows = [values[layer, :count] for layer, count in enumerate(heads)]
            scale = Scale.of(values)
            if self.opens_on is None and at == 0:
                self.opens_on = _most_changed(scale.place(values))
            if name in bands:
                packed_bands.append({"name": name, "block": self._put(_floats(_band(np.concatenate(rows))))})
            weights = [IMPORTANT if each in FIRST else 1 for each in names[at:]]
            stride, blocks = self._put_quantity(rows, scale, exact, weights[0] / sum(weights))
            entry: dict[str, Any] = {"name": name, **scale.description(), "bits": 32 if exact else 8}
            entry |= {"stride": stride, "blocks": blocks}
            if name == "max_logit_max":
                entry |= {"heading": texts.LARGEST_LOGIT, "meaning": texts.LARGEST_LOGIT_MEANING}
            quantities.append(entry)
            if stride > 1:
                self.coarse[entry.get("heading", name.replace("_", " "))] = stride
        self.description = {
            "steps": [*history.steps],
            "starts": [*history.starts],
            "quantities": quantities,
            "bands": packed_bands,
            "alarms": alarms,
            "whats": [*OF_ALARM],
            "alarmed": history.limits is not None,
            "limits": {
                name: getattr(history.limits, limit) for name, limit in LIMITS.items() if history.limits is not None
            },
        }

    @property
    def content(self) -> str:
        return base64.b64encode(bytes(self._content)).decode("ascii")

    def _put(self, block: bytes, differs: bool = False) -> tuple[int, int]:
        packed = _deflated(block, differs)
        place = (len(self._content), len(packed))
        self._content += packed + b"\0" * (-len(packed) % 3)
        return place

    def _put_quantity(
        self, rows: Sequence[Array], scale: Scale, exact: bool, share: float
    ) -> tuple[int, list[tuple[int, int]]]:
        """Add the blocks of a quantity; return the stride of their columns, and their places.

        Args:
            rows: of each layer, [heads, steps].
            scale: of the quantity.
            exact: whether the page has room for float32.
            share: of the free room that it may take.
        """
        if exact:
            return 1, [self._put(_floats(values)) for values in rows]
        codes = [scale.codes(values) for values in rows]
        start, stride = len(self._content), 1
        room = max(0, MOST_BYTES - start) * share
        while True:
            blocks = [self._put(_differences(each[:, ::stride]).tobytes(), differs=True) for each in codes]
            size = len(self._content) - start
            if size <= room or stride >= codes[0].shape[1]:
                return stride, blocks
            del self._content[start:]
            stride = min(codes[0].shape[1], max(stride + 1, math.ceil(stride * size / max(1.0, room))))


def _alarms(history: TrainingHistory) -> list[list[Any]]:
    """Return step, layer, head, kind, value, limit, reference and its step; None where one is infinite or unknown."""
    layers, kinds = {name: n for n, name in enumerate(history.heads)}, [*OF_ALARM]
    alarms: list[list[Any]] = []
    shown = history.alarms[:MOST_ALARMS]
    there = {each.what for each in shown}
    values = {what: history[name] for what, name in OF_ALARM.items() if what in there and name in history.names}
    for alarm in shown:
        if alarm.what in kinds and alarm.head < history.heads.get(alarm.layer, 0):
            numbers = [float(x) if math.isfinite(x) else None for x in (alarm.value, alarm.limit, alarm.reference)]
            place = layers[alarm.layer], alarm.head
            of = values.get(alarm.what)
            since = None if of is None else _step_of_reference(history, alarm, of[:, place[0], place[1]])
            alarms.append([alarm.step, *place, kinds.index(alarm.what), *numbers, since])
    return alarms


def _step_of_reference(history: TrainingHistory, alarm: RaisedAlarm, values: Tensor) -> int | None:
    """Return the first step of the alarm's watch that had its reference, of values [steps]; None if not stored."""
    begin = max((start for start in history.starts if start <= alarm.step), default=0)
    first, stop = bisect_left(history.steps, begin), bisect_right(history.steps, alarm.step)
    there = np.flatnonzero(np.isclose(values[first:stop].double().numpy(), alarm.reference, rtol=SAME, atol=0.0))
    return int(history.steps[first + int(there[0])]) if len(there) else None


def _most_changed(values: Array) -> tuple[int, int]:
    """Return the layer and head whose value changes most, from values [layers, heads, steps]."""
    there = np.isfinite(values)
    most = np.where(there, values, -np.inf).max(-1)
    least = np.where(there, values, np.inf).min(-1)
    change = np.where(there.any(-1), most - least, -1.0)
    layer, head = np.unravel_index(int(change.argmax()), change.shape)
    return int(layer), int(head)


def _band(values: Array) -> Array:
    """Return minimum, 10 %, median, 90 % and maximum over heads by the nearest rank, [5, steps]; NaN without a head."""
    ordered = np.sort(values, axis=0)  # NaN is last
    count = (~np.isnan(values)).sum(0)
    ranks = [np.rint(share * (count - 1)).clip(0).astype(np.int64) for share in (0, 0.1, 0.5, 0.9, 1)]
    return np.stack([np.take_along_axis(ordered, rank[None], 0)[0] for rank in ranks])


def _differences(codes: Array) -> Array:
    """Return codes minus those of the column before, modulo 256."""
    less = codes.copy()
    less[:, 1:] -= codes[:, :-1]
    return less


def _floats(values: Array) -> bytes:
    return np.ascontiguousarray(values).astype("<f4").tobytes()


def _deflated(block: bytes, differs: bool) -> bytes:
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_FILTERED if differs else zlib.Z_DEFAULT_STRATEGY)
    return coder.compress(block) + coder.flush()
