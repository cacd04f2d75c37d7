"""The heads whose q, k, lse and mask lie in the page, so that it computes any piece of their weights itself.

The blocks follow each other, each at a multiple of three bytes, as in ``packing``. The description of a head has:

    layer, head, lengths, depth, scale, softcap     of the call; lengths are the numbers of queries and keys
    window           of a text that was read in windows, the one that q and k are of; else None
    bits, error      of a value of q and k; the most by which a weight differs from the model's, as a share of it
    q, k             kind and place of a block, see ``exact_values``
    lse              float32 [queries]; inf in rows without visible keys, NaN in rows without weights
    spans, rows, n   the visible keys, see ``spans_block``; rows is 1 if all queries have the same ones
    rest             bits [rows, columns] of the visible pairs, for masks that spans cannot express
    bias             float32 [rows, columns], or relative: by key - query + queries - 1

The keys of a group of heads, and the mask and bias of a layer, are stored once for each window.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from headscope.report._viewer import texts
from headscope.report._viewer.exact_values import (
    WIDTHS,
    Matrix,
    deflated,
    kind_of,
    largest_error,
    relative_bias,
    spans_block,
)
from headscope.report._viewer.places import Observed, Place, places_of

Scored = tuple[str, float, int, bool]
"""As in ``model``, which imports this module."""

MOST_HEADS = 8
MOST_BYTES = 96 * 10**6
"""The most bytes of all requested heads, in base64 before compression."""

MOST_BYTES_BY_DEFAULT = 24 * 10**6
"""The same where no heads were requested: a page does not grow by more on its own."""

MOST_BYTES_OF_WINDOWS = 7 * 10**5
"""The same of all windows of a text together, unless one alone takes more."""

MOST_BYTES_OF_HEAD = 48 * 10**6
SMALL_ERROR = 1e-3  # of a weight: from here on 32 bits replace 16, where they fit
MOST_ERROR = 0.1
MOST_BIAS = 2**20  # values of a bias, if it depends on more than the distance
MOST_RELATIVE = 2**26  # pairs of a bias that is searched for dependence on the distance alone
MOST_REST = 2**23  # pairs of a mask that spans cannot express
DULL = frozenset({"uniform", "first", "local"})  # as in viewer/src/state.ts


class Weights(Protocol):
    """The inputs of the weights of a layer; see ``stats._kept_weights``."""

    @property
    def parts(self) -> Mapping[str, Any]: ...
    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def unverified(self) -> str | None: ...
    @property
    def queries(self) -> int: ...
    @property
    def keys(self) -> int: ...
    def checked(self) -> Weights: ...
    def precise_lse(self, b: int, head: int) -> Tensor: ...


class Access(Protocol):
    """Access to the weights of a layer."""

    def to_weights(self) -> Weights: ...


@dataclass(frozen=True, eq=False)
class ExactHeads:
    """The heads that a page computes, the base64 of their blocks, and why it has no others."""

    heads: Sequence[Mapping[str, Any]] = ()
    content: str = ""
    notes: Sequence[str] = ()

    def description(self) -> list[dict[str, Any]]:
        """Return the heads as the page's script reads them."""
        return [dict(head) for head in self.heads]


@dataclass(frozen=True, eq=False)
class Chosen:
    """A head and the weights of its layer, of one window where a text was read in windows."""

    place: Place
    weights: Weights
    window: int | None = None

    def size(self, bits: int) -> int:
        """Return the most bytes in base64 that q, k and lse of the head take, in at most so many bits a value."""
        queries, keys, depth = self.weights.queries, self.weights.keys, self.weights.sizes["q"][3]
        kind = kind_of(self.weights.parts["q"][0, 0, 0:1], bits)
        scale = 4 if kind.startswith("int") else 0
        return 4 * ((depth * WIDTHS[kind] + scale) * (queries + keys) + 4 * queries) // 3


@dataclass
class Content:
    """Blocks, each stored once."""

    data: bytearray = field(default_factory=bytearray)
    places: dict[object, tuple[int, int]] = field(default_factory=dict[object, tuple[int, int]])

    @property
    def size(self) -> int:
        """The bytes in base64."""
        return 4 * len(self.data) // 3

    def base64(self) -> str:
        """Return all blocks."""
        return base64.b64encode(bytes(self.data)).decode("ascii")

    def cut(self, size: int) -> None:
        """Remove the blocks that were put after the content had so many bytes in base64."""
        del self.data[3 * size // 4 :]
        self.places = {key: place for key, place in self.places.items() if place[0] < len(self.data)}

    def put(self, key: object, block: bytes, *, search: bool = False) -> tuple[int, int]:
        """Return where the block of a key lies."""
        if key not in self.places:
            packed = deflated(block, search=search)
            self.places[key] = (len(self.data), len(packed))
            self.data.extend(packed + b"\0" * (-len(packed) % 3))
        return self.places[key]


def choose_heads(
    heads: Sequence[int],
    patterns: Sequence[Sequence[Sequence[Scored]]],
    first: Place | None = None,
) -> list[Place]:
    """Return the heads to store where none were requested: those that match an informative pattern best.

    The first one is the head that the page opens on.

    Args:
        heads: the number of heads of each layer; 0 = the page cannot compute those of this layer.
        patterns: of each layer and head, the best match first.
        first: the head that the page opens on, if it is not the best match.
    """
    scores: list[tuple[bool, float, int, int]] = []
    for n, count in enumerate(heads):
        for head in range(count):
            best = patterns[n][head][:1] if patterns else []
            value = best[0][1] - (best[0][0] in DULL) if best else -1.0
            scores.append(((n, head) != first, -value, n, head))
    return [(n, head) for _, _, n, head in sorted(scores)[:MOST_HEADS]]


def exact_heads_of_sheet(
    tiles: Sequence[Access | None], patterns: Sequence[Sequence[Sequence[Scored]]], opens_on: Place | None
) -> ExactHeads:
    """Return the heads of a sheet's page, from access to the weights of its layers."""
    weights = [_weights(each) for each in tiles]
    heads = [0 if each is None else each.sizes["q"][1] for each in weights]
    chosen = [
        Chosen((layer, head), kept)
        for layer, head in choose_heads(heads, patterns, opens_on)
        if (kept := weights[layer]) is not None and not refusal_of(kept, head)
    ]
    content = Content()
    return replace(_pack(chosen, False, content), content=content.base64())


def exact_heads(
    parts: Mapping[str, Observed],
    patterns: Sequence[Sequence[Sequence[Scored]]],
    request: Sequence[tuple[int | str, int]] | None,
    windows: Sequence[int] = (),
) -> ExactHeads:
    """Return the requested heads, or those of ``choose_heads``; heads that do not fit are left out, with a note.

    Args:
        parts: the layers.
        patterns: of each layer and head, the best match first.
        request: the heads; None = those of ``choose_heads``.
        windows: of a text that was read in windows, all of them, those to store first at the beginning. The page holds
            the first one whose q and k were retained, and the next ones that ``MOST_BYTES_OF_WINDOWS`` allows. () = the
            last call.

    Raises:
        TypeError, ValueError: a requested head does not exist, has no q and k or no map, or its weights cannot be
            computed in the page; or the file of the recording was changed or damaged since it was loaded.
    """
    if request is None:
        heads = [part.heads if part.tiles and part.map is not None else 0 for part in parts.values()]
        places = choose_heads(heads, patterns)
    else:
        places = [*dict.fromkeys(places_of("exact", request, parts, MOST_HEADS))]
    layers = list(parts.values())
    held = [window for window in windows if any(window in layers[layer].tiles for layer, _ in places)]
    content = Content()
    requested = request is not None
    found = _pack(_chosen(layers, places, requested, held[0] if held else None), requested, content)
    for window in held[1:]:
        before = content.size
        more = _pack(_chosen(layers, places, requested, window), requested, content)
        if content.size > MOST_BYTES_OF_WINDOWS:
            content.cut(before)
            break
        found = replace(found, heads=[*found.heads, *more.heads])
    return replace(found, content=content.base64())


def _chosen(layers: Sequence[Observed], places: Sequence[Place], requested: bool, window: int | None) -> list[Chosen]:
    """Return the heads with the weights of a window; None = of the last call.

    Raises:
        ValueError: a requested head cannot be computed in the page.
    """
    of_layers = [each.last_tiles if window is None else each.tiles.get(window) for each in layers]
    weights = {layer: _weights(of_layers[layer]) for layer, _ in places}
    chosen: list[Chosen] = []
    refused: list[str] = []
    for layer, head in places:
        kept = weights[layer]
        if layers[layer].map is None:
            why = texts.EXACT_NO_MAP
        else:
            why = texts.EXACT_MODIFIED if kept is None else refusal_of(kept, head)
        if why:
            refused.append(texts.exact_refused(layer, head, why))
        elif kept is not None:
            chosen.append(Chosen((layer, head), kept, window))
    if requested and refused:
        raise ValueError(f"exact: {refused[0]}")
    return chosen


def _weights(access: Access | None) -> Weights | None:
    """Return the weights of a layer, or None without q and k or after its mask was modified.

    Those of a file without checksums are checked first.
    """
    try:
        weights = None if access is None else access.to_weights()
    except ValueError:
        return None
    return weights if weights is None or weights.unverified is None else weights.checked()


def refusal_of(weights: Weights, head: int) -> str:
    """Return why the page cannot compute the weights of a head; empty if it can."""
    if 0 in weights.sizes["q"] or 0 in weights.sizes["k"]:
        return texts.EXACT_EMPTY
    rest, bias = (weights.sizes.get(name, (1, 1, 1, 1)) for name in ("rest", "bias"))
    if rest[2] * rest[3] > MOST_REST:
        return texts.exact_mask(MOST_REST)
    if bias[2] * bias[3] > MOST_RELATIVE:
        return texts.exact_bias(MOST_BIAS)
    if bias[2] * bias[3] > MOST_BIAS and relative_bias(_of_head(weights, "bias", head)) is None:
        return texts.exact_bias(MOST_BIAS)
    return ""


def _pack(chosen: Sequence[Chosen], requested: bool, content: Content) -> ExactHeads:
    """Put the heads in the largest number of bits that fits, and otherwise the first ones of them that fit."""
    room = MOST_BYTES if requested else MOST_BYTES_BY_DEFAULT
    fitting, bits = chosen, 0
    for bits in (32, 16, 8) if requested else (32, 16):
        if all(each.size(bits) <= MOST_BYTES_OF_HEAD for each in chosen) and _size(chosen, bits) <= room:
            break
    else:
        fitting = []
        for each in chosen:
            if each.size(bits) <= MOST_BYTES_OF_HEAD and _size([*fitting, each], bits) <= room:
                fitting = [*fitting, each]
    heads: list[Mapping[str, Any]] = []
    coarse = 0
    for each in fitting:
        described = _describe(each, bits, content)
        if described is None:
            coarse += 1
        else:
            heads.append(described)
    notes = [texts.exact_left_out(len(heads), len(chosen), requested)] if len(fitting) < len(chosen) else []
    notes += [texts.exact_coarse(coarse)] if coarse else []
    return ExactHeads(heads, notes=notes)


def _size(chosen: Sequence[Chosen], bits: int) -> int:
    return sum(each.size(bits) for each in chosen)


def _describe(each: Chosen, bits: int, content: Content) -> dict[str, Any] | None:
    """Return the description of a head, and put its blocks; None if a weight would change by over ``MOST_ERROR``."""
    weights, (layer, head) = each.weights, each.place
    run = each.window, layer
    sizes = weights.sizes
    group = head * sizes["k"][1] // sizes["q"][1]
    q, k = weights.parts["q"][0, head, :], weights.parts["k"][0, group, :]
    lse = weights.precise_lse(0, head)
    stored: tuple[Matrix, Matrix] | None = None
    error = 0.0
    for most in (16, 32) if bits == 32 else (bits,):
        stored = Matrix.of(q, kind_of(q, most)), Matrix.of(k, kind_of(k, most))
        error = largest_error(*stored, lse, weights.scale)
        if error <= SMALL_ERROR:
            break
    if stored is None or error > MOST_ERROR:
        return None
    places = [
        {"kind": x.kind, "at": content.put((run, name, n, x.kind), x.block)}
        for x, name, n in zip(stored, "qk", (head, group), strict=True)
    ]
    return {
        "layer": layer,
        "head": head,
        "window": each.window,
        "lengths": [weights.queries, weights.keys],
        "depth": sizes["q"][3],
        "scale": weights.scale,
        "softcap": weights.softcap,
        "bits": int(stored[0].kind.lstrip("bfloatin")),
        "error": error,
        "q": places[0],
        "k": places[1],
        "lse": content.put((run, "lse", head), lse.float().numpy().astype("<f4").tobytes()),
        **_mask(weights, run, head, content),
    }


def _mask(weights: Weights, run: object, head: int, content: Content) -> dict[str, Any]:
    """Return the description of mask and bias; ``run``: the layer, and the window that they are of."""
    described: dict[str, Any] = {"spans": None, "rest": None, "bias": None}
    if "spans" in weights.parts:
        spans = weights.parts["spans"][0, :]
        at = content.put((run, "spans"), spans_block(spans), search=True)
        described["spans"] = {"at": at, "rows": spans.shape[0], "n": spans.shape[1]}
    if "rest" in weights.parts:
        rest = _of_head(weights, "rest", head).contiguous()
        block = np.packbits(rest.numpy()).tobytes()
        at = content.put((run, "rest", min(head, weights.sizes["rest"][1] - 1)), block, search=True)
        described["rest"] = {"at": at, "rows": rest.shape[0], "columns": rest.shape[1]}
    if "bias" in weights.parts:
        bias = _of_head(weights, "bias", head).float()
        rows, columns = bias.shape
        relative = relative_bias(bias) if min(rows, columns) > 1 else None
        values = bias.contiguous() if relative is None else relative
        key = (run, "bias", min(head, weights.sizes["bias"][1] - 1))
        at = content.put(key, values.numpy().astype("<f4").tobytes(), search=True)
        described["bias"] = {"at": at, "rows": rows, "columns": columns, "relative": relative is not None}
    return described


def _of_head(weights: Weights, name: str, head: int) -> Tensor:
    """Return the part of a tensor that broadcasts to [B, H, Q, K] that a head of the first input reads."""
    return weights.parts[name][0, min(head, weights.sizes[name][1] - 1), :]
