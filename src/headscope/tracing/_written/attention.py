"""Stage 4: scores, scale, cap, bias, mask, weights and the outputs of the heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headscope._support.torch_operations import PRODUCTS
from headscope.tracing._explanations import quantity
from headscope.tracing._invariants import Check, close, equal, rounding
from headscope.tracing._written.arrangement import Arrangement, Coordinate
from headscope.tracing._written.axes import name_axes
from headscope.tracing._written.masks import Masked, describe_mask
from headscope.tracing._written.origins import SOFTMAXES, Field, Softmax
from headscope.tracing._written.projections import letters_of
from headscope.tracing._written.rows import Writer, unusual
from headscope.tracing._written.scale import format_scale, judge_scale
from headscope.tracing._written.scores import LOW, Step, added_by_product, read_steps
from headscope.tracing._written.sides import Change, Side

POWERS = {"pow", "exp", "exp2", "expm1", "sigmoid"}  # a softmax may be made of them
USUAL = ("B", "H", "Q", "K")


class AttentionRows:
    """The writer of the rows of stage 4.

    Args:
        writer: collects the rows.
        sides: queries, keys and values.
        width: of the model, E; None if it is not known.
    """

    def __init__(self, writer: Writer, sides: Sequence[Side], width: int | None) -> None:
        self.writer, self.origins, self.attention = writer, writer.origins, writer.attention
        self.tape = writer.origins.tape
        self.q, self.k, self.v = sides
        self.width = width
        self.root = self.origins.roots(self.attention.p)
        self.products = [event for event in self.tape.makers(self.root) if event.name in PRODUCTS]
        self.steps = self._synthesise() + read_steps(self.origins, self.attention.p)
        self.hidden = torch.zeros(self.attention.p.shape, dtype=torch.bool)
        self.dtype = self.products[0].values.dtype

    def _bare(self) -> Tensor:
        """Return the products of queries and keys in float64, [B, H, Q, K]."""
        keys = self.attention.p.shape[-1]
        return (self.tape.values(self.attention.q) @ self.tape.values(self.attention.k).transpose(-2, -1))[..., :keys]

    def _synthesise(self) -> list[Step]:
        """Return the scale and the sum that a product (baddbmm) does by itself."""
        event = self.products[0]
        alpha, added = added_by_product(event, self.origins)
        steps: list[Step] = []
        bare = self._bare()
        events = tuple(self.products)
        if alpha != 1:
            steps.append(Step("scale", event, self.root, bare, alpha * bare, factor=alpha, events=events))
        if added is not None and len(self.products) == 1:
            more = added.flatten()[self.root - event.start]
            hidden = more <= LOW if bool((more <= LOW).any()) else None
            kind = "mask" if hidden is not None and bool(((more == 0) | hidden).all()) else "bias"
            after = alpha * bare + more
            fill = None if hidden is None else float(after[hidden].max())
            if bool((more != 0).any()):
                steps.append(Step(kind, event, self.root, alpha * bare, after, fill, hidden, events))
        return steps

    def run(self) -> None:
        """Add every step from the scores to the outputs of the heads."""
        scales = [step for step in self.steps if step.kind == "scale"]
        before = [change for side in (self.q, self.k) for change in side.changes if change.factor is not None]
        note = self._judge(scales)
        early = bool(before) and not scales
        for change in before:
            self._scale_operand(change, note if early and change is before[-1] else None)
        self._scores(None if scales or before else note)
        for step in self.steps:
            is_last = bool(scales) and step is scales[-1]
            self._step(step, note if is_last else None)
        if not any(step.kind == "weights" for step in self.steps):
            self.writer.missing["weights"] = self._describe_absence()
        self._outputs()

    def _describe_absence(self) -> str:
        """Return why there is no row of the weights; exponentials may be a softmax that is divided elsewhere."""
        p = self.attention.p
        if bool((self.origins.of(Field.EXPONENTIAL, p) >= 0).any()):
            return "the exponentials of scores do not sum to 1 over the keys before their product with values"
        names = {event.name for step in self.steps if step.kind == "other" for event in step.events}
        if names & POWERS:
            return "no step was identified as a softmax"
        return unusual("there is no softmax", "no-softmax").removeprefix("unusual: ")

    @property
    def is_certain(self) -> bool:
        """Whether every operation before the weights was identified."""
        return all(step.kind != "other" for step in self._before_weights())

    def _judge(self, scales: Sequence[Step]) -> str | None:
        """Return the note on the scale, if it is not the usual one."""
        if not self.is_certain:
            return None
        after = [step for step in self.steps if step.kind == "scale after"]
        if any(step.factor is None for step in scales):
            return unusual("heads have scales of their own", "scale-not-uniform")
        signs = [step for step in self.steps if step.kind == "bias" and step.factor is not None]
        total = self.q.factor * self.k.factor * math.prod(step.factor or 1.0 for step in (*scales, *signs))
        if any(event.name == "exp2" for step in self.steps for event in step.events):
            total *= math.log(2)  # 2^s is the exponential of s · ln 2
        if self.q.others or self.k.others:
            length = self.tape.values(self.attention.q).norm(dim=-1)
            if bool(((length - self.q.factor).abs() < 1e-3).all()):
                return None  # cosine similarity: the usual scale is not expected
        steps = [step.factor or 1.0 for step in scales]
        steps += [c.factor for side in (self.q, self.k) for c in side.changes if c.factor is not None]
        sizes = (self.attention.q.shape[-1], self.width, self.attention.p.shape[-1])
        note = judge_scale(total, steps, *sizes)
        return None if after and note and "scale-missing" in note else note

    def _format(self, factor: float) -> str:
        return format_scale(factor, self.attention.q.shape[-1], self.width, self.dtype)

    def _scale_operand(self, change: Change, note: str | None) -> None:
        side = self.q if change in self.q.changes else self.k
        letters = letters_of(self.writer, side.name)
        usual = tuple(letters[each] for each in (Coordinate.BATCH, Coordinate.HEAD, Coordinate.TIME, Coordinate.WIDTH))
        result, dtype = self.writer.result_of(change.events, change.ids, letters, usual)
        factor = change.factor or 1.0
        check = Check(f"the measured factor is {factor:.4g} for every number", None, True)
        equation = f"{side.name} ← {side.name} · {self._format(factor)}"
        notes = [f"on the {'queries' if side is self.q else 'keys'}, before their product", *([note] if note else [])]
        notes = notes[::-1] if note else notes
        self.writer.add(4, "scale", result, dtype, equation=equation, events=change.events, check=check, notes=notes)

    def _scores(self, note: str | None) -> None:
        q, k = self.tape.values(self.attention.q), self.tape.values(self.attention.k).transpose(-2, -1)
        alpha, added = added_by_product(self.products[0], self.origins)
        keys = self.attention.p.shape[-1]
        bare, size = (q @ k)[..., :keys], (q.abs() @ k.abs())[..., :keys]
        claim = "equals q kᵀ in float64"
        actual = self.tape.values(self.root)
        if alpha != 1 or added is not None:
            claim = "the code's own product equals α q kᵀ + what it adds, in float64"
            more = torch.zeros(()) if added is None else added.flatten()[self.root - self.products[0].start]
            bare, size = alpha * bare + more, abs(alpha) * size + more.abs()
        exact = torch.isfinite(bare) & torch.isfinite(actual)
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        allowed = size * rounding(self.dtype, q.shape[-1])
        check = close(claim, actual[exact].to(kind), bare[exact], allowed[exact])
        notes = [note] if note else []
        notes += self._note_heads()
        result, dtype = self.writer.result_of(self.products, self.root, self.writer.pairs, USUAL)
        self.writer.add(
            4, "scores", result, dtype, equation="s[i, j] = q[i] · k[j]", events=self.products, check=check, notes=notes
        )

    def _note_heads(self) -> list[str]:
        """Return notes on heads that share keys, or weights."""
        attention = self.attention
        notes: list[str] = []
        if not attention.is_sound:
            batches = "N counts the products of the code: batch entries, heads, blocks or positions"
            places = "Q and K count places in the heads of the code, which are not positions"
            return [places] if self.writer.head_letter == "H" else [places, batches]
        if (entry := _entry_of_others(attention)) is not None:
            text = f"the queries of batch entry {entry[0] + 1} are compared with the keys of entry {entry[1] + 1}"
            notes.append(unusual(text, "batches-mixed"))
        if attention.kv_heads < attention.p.shape[1]:
            head = self.writer.coordinates[Coordinate.HEAD][attention.k[0, :, 0, 0]]
            order: list[int] = head.tolist()
            if order != sorted(order):
                text = f"query heads 1, 2, 3, … use key heads {', '.join(str(n + 1) for n in order)}"
                notes.append(unusual(text, "kv-heads-tiled"))
            elif attention.query_heads > 1:
                notes.append(f"{attention.p.shape[1]} query heads share {attention.kv_heads} key heads")
        if attention.query_heads == 1 < attention.p.shape[1] and bool((attention.p == attention.p[:, :1]).all()):
            notes.append(unusual("every head uses the scores of one head", "heads-share-weights"))
        return notes

    def _step(self, step: Step, note: str | None) -> None:
        """Add the row of one step."""
        adders = {
            "scale": self._scale, "cap": self._cap, "bias": self._bias, "mask": self._mask, "weights": self._weights,
            "dropout": self._dropout, "mask after": self._mask_after, "scale after": self._scale_after,
        }  # fmt: skip
        if step.kind in adders:
            adders[step.kind](step, note)
        else:
            place = "" if step.event.line is None else f" at {step.event.line.place}"
            self.writer.missing[f"{step.event.name.strip('_')}{place}"] = "this operation was not identified"

    def _add(self, name: str, step: Step, equation: str, check: Check, notes: Sequence[str | None]) -> None:
        result, dtype = self.writer.result_of(step.events or (step.event,), step.ids, self.writer.pairs, USUAL)
        own = [note for note in notes if note]
        own = sorted(own, key=lambda text: not text.startswith("unusual"))
        self.writer.add(4, name, result, dtype, equation=equation, events=step.events, check=check, notes=own)

    def _scale(self, step: Step, note: str | None) -> None:
        if step.factor is None:
            check = Check(f"the measured factor is the same for all scores of a head: {step.detail}", None, True)
            return self._add("scale", step, "s ← s · c[h]", check, [note])
        check = Check(f"the measured factor is {step.factor:.4g} for every score", None, True)
        equation = "s[i, j] ← −s[i, j]" if step.factor == -1 else f"s[i, j] ← s[i, j] · {self._format(step.factor)}"
        return self._add("scale", step, equation, check, [note])

    def _cap(self, step: Step, note: str | None) -> None:
        cap = step.factor or 1.0
        allowed = step.before.abs().clamp(max=abs(cap)) * 4 * rounding(self.dtype, 1)
        claim = f"no score is beyond ±{abs(cap):g}, and each equals c · tanh(s / c) in float64"
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        check = close(claim, step.after.to(kind), cap * torch.tanh(step.before / cap), allowed)
        self._add("softcap", step, f"s[i, j] ← c · tanh(s[i, j] / c), c = {cap:g}", check, [note])

    def _bias(self, step: Step, note: str | None) -> None:
        if step.factor is not None:
            return self._difference(step, note)
        delta = step.after - step.before
        shown = torch.ones_like(delta, dtype=torch.bool) if step.hidden is None else ~step.hidden
        finite = delta[shown & delta.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
        check = Check("every score changes by its bias", f"from {low:.3g} to {high:.3g}", True)
        notes = [note]
        if {abs(round(value, 4)) for value in finite.unique().tolist()} == {0.0, 1.0} and low * high == 0:
            text = f"the numbers that are added are {low:.0f} and {high:.0f}, as of a boolean mask; they hide nothing"
            notes.append(unusual(text, "bool-mask-added"))
        if step.hidden is None:
            return self._add("bias", step, "s[i, j] ← s[i, j] + bias[i, j]", check, notes)
        notes.append("the same sum also hides pairs: see the mask")
        self._add("bias", step, "s[i, j] ← s[i, j] + bias[i, j]", check, notes)
        before = torch.where(step.hidden, step.before, step.after)
        return self._mask(replace(step, before=before, factor=float(step.after[step.hidden].max())), None)

    def _difference(self, step: Step, note: str | None) -> None:
        """Add a row for scores that are taken from other numbers."""
        total = step.before + step.after
        finite = total[total.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
        is_one = math.isclose(low, high, rel_tol=1e-5)
        term, outcome = (f"{low:.3g}", None) if is_one else ("bias[i, j]", f"from {low:.3g} to {high:.3g}")
        check = Check(f"every score changes its sign, and {term if is_one else 'its bias'} is added", outcome, True)
        self._add("bias", step, f"s[i, j] ← {term} − s[i, j]", check, [note])

    def _mask(self, step: Step, note: str | None) -> None:
        hidden = torch.zeros_like(self.hidden) if step.hidden is None else step.hidden
        self.hidden = self.hidden | hidden
        weights = self.tape.values(self.attention.p)
        masked = Masked(
            hidden, self.hidden, weights, step.factor or 0.0, self.attention.query_token, self.attention.key_token
        )
        if step.detail == "multiplied" and any(each.kind == "mask after" for each in self.steps):
            check = Check("every other score is unchanged", "to the bit", True)
            note_on_weights = "the scores become 0, which hides nothing: see the mask after the softmax"
            self._add("mask", step, "s[i, j] ← 0 where pair (i, j) is hidden", check, [note, note_on_weights])
            return
        text = describe_mask(masked, quantity)
        unchanged = equal("", step.after[~hidden], step.before[~hidden])
        check = Check(text.claim, text.outcome, text.held and bool(unchanged.held))
        if not unchanged.held and text.held:
            check = Check(text.claim, f"of the visible scores, {unchanged.outcome}", False)
        queries, keys = self.attention.p.shape[2:]
        later = "j > i" if queries == keys else "j > i + K − Q"
        where = later if text.is_causal else "pair (i, j) is hidden"
        hides = bool(hidden.any()) and step.factor is not None
        fill = "−∞" if step.factor == -math.inf or not hides else f"{step.factor:.4g}"
        self._add("mask", step, f"s[i, j] ← {fill} where {where}", check, [note, *text.notes])

    def _weights(self, step: Step, note: str | None) -> None:
        softmax = next((each for each in self.origins.softmaxes if each.event in step.events), None)
        p = step.after
        empty = self.hidden.all(-1) | p.isnan().all(-1)
        sums = p.sum(-1)
        visible = ~empty & (step.before > -torch.inf).any(-1)
        share = self._share_of_sinks(softmax, step)
        row = "each row with a visible key" if bool((~visible).any()) else "each row"
        target = torch.ones_like(sums) if share is None else 1 - share
        less = "" if share is None else " minus the share of its sink"
        claim = f"{row} sums to 1{less} over the keys; weights lie in [0, 1]"
        unit = rounding(step.event.values.dtype, p.shape[-1])
        kind = torch.float64 if step.event.values.dtype == torch.float64 else torch.float32
        check = close(
            claim,
            sums[visible].to(kind),
            target[visible],
            torch.full_like(
                sums[visible], 4 * unit + (2e-6 if softmax and not softmax.event.name.endswith("softmax") else 0)
            ),
        )
        outside = int(((p < 0) | (p > 1 + 4 * unit)).sum())
        if outside:
            check = Check(claim, f"{outside:,} weights lie outside [0, 1]", False)
        notes = [note, *self._note_softmax(softmax)]
        names = {event.name for event in step.events}
        if "exp" in names and not names & {"sub", "rsub", "_log_softmax", *SOFTMAXES}:
            text = "exp without subtracting the largest score of a row: it overflows where scores are large"
            notes.append(unusual(text, "softmax-overflows"))
        nans = int(p.isnan().any(-1).sum())
        if nans:
            notes.append(unusual(f"{nans} of {sums.numel()} rows see no key and are NaN", "nan-on-empty-row"))
        self._add("weights", step, "p = exp s / Σⱼ exp s", check, notes)

    def _share_of_sinks(self, softmax: Softmax | None, step: Step) -> Tensor | None:
        """Return the weight of logits beside those of the keys, [B, H, Q]; None without any."""
        if softmax is None or softmax.event.out.shape[softmax.axis] == self.attention.p.shape[-1]:
            return None
        whole = self.tape.values(softmax.event.out)
        if not bool(torch.isin(step.ids, softmax.event.out).all()):
            return None
        rows = whole.sum(softmax.axis, keepdim=True).expand(whole.shape)
        flat, order = softmax.event.out.flatten().sort()
        at = order[torch.searchsorted(flat, step.ids[..., 0].contiguous())]
        total = rows.flatten()[at]
        share = total - step.after.sum(-1)
        return share if bool((share > 1e-9).any()) else None

    def _note_softmax(self, softmax: Softmax | None) -> list[str]:
        if softmax is None or not self.is_certain:
            return []
        notes: list[str] = []
        if softmax.before is not None:
            notes.append(unusual("this is the softmax of weights: it was applied twice", "softmax-twice"))
        size = softmax.event.out.shape[softmax.axis]
        axis = name_axes(self.writer.coordinates, softmax.event.out, self.writer.pairs, USUAL)[softmax.axis][0]
        if size > 1 and "K" not in axis.split("·") and axis != "?":
            names = {"Q": ("the queries", "softmax-over-queries"), "H": ("the heads", "softmax-over-heads")}
            words = names.get(axis)
            if words is not None:
                notes.append(unusual(f"the softmax runs over {words[0]}, not over the keys", words[1]))
        return notes

    def _before_weights(self) -> Sequence[Step]:
        kinds = [step.kind for step in self.steps]
        return self.steps[: kinds.index("weights")] if "weights" in kinds else self.steps

    def _dropout(self, step: Step, note: str | None) -> None:
        dropped = float((step.after == 0).double().mean())
        check = Check("each weight is 0 or enlarged by one factor", f"{dropped:.0%} are 0", True)
        text = unusual("dropout is active although the module is in eval", "dropout-in-eval")
        self._add("dropout", step, "p[i, j] ← 0, or p[i, j] / (1 − chance)", check, [note, text])

    def _mask_after(self, step: Step, note: str | None) -> None:
        before, after = step.before, step.after
        hidden = (after == 0) & (before != 0)
        whole = (after == 0).all(-1)
        lost = hidden & ~whole[..., None]
        check = Check("every other weight is unchanged", "to the bit", True)
        sums = after.sum(-1)
        bad = ((sums - 1).abs() > 1e-4) & ~whole
        notes = [note, f"{quantity(int(hidden.sum()))} weights become 0"]
        final = self.tape.values(self.attention.p).sum(-1)
        if bool(lost.any()) and bool(((final - 1).abs() <= 1e-4)[~whole].all()):
            notes.append("the rows are divided by their new sum before the product with the values")
        elif bool(lost.any()) and bool(bad.any()):
            check = Check(
                "each row still sums to 1 over the keys", f"{int(bad.sum())} of {bad.numel()} rows do not", False
            )
            notes.append(unusual("pairs are hidden after the softmax, so rows lose their weight", "mask-after-softmax"))
        else:
            notes.append("these rows see no key")
        self._add("mask after the softmax", step, "p[i, j] ← 0 where hidden", check, notes)

    def _scale_after(self, step: Step, note: str | None) -> None:
        factor = step.factor or 1.0
        sums, final = step.after.sum(-1), self.tape.values(self.attention.p).sum(-1)
        text = f"the weights are multiplied by {factor:.4g} after the softmax"
        if bool(((final - 1).abs() <= 1e-4)[sums != 0].all()):
            check = Check("the weights that the values are multiplied by sum to 1 in each row again", None, True)
        elif any(each.kind == "other" for each in self.steps[self.steps.index(step) :]):
            outcome = f"the sums are {float(final.min()):.4g} to {float(final.max()):.4g}"
            claim = "the weights that the values are multiplied by sum to 1 in each row"
            check = Check(claim, outcome, False)
        else:
            outcome = f"the sums are {float(sums.nan_to_num(0).max()):.4g}"
            check = Check("each row still sums to 1 over the keys", outcome, False)
            text = unusual(text, "scaled-after-softmax")
        self._add("scale after the softmax", step, f"p[i, j] ← p[i, j] · {factor:.4g}", check, [note, text])

    def _outputs(self) -> None:
        p, v = self.tape.values(self.attention.p), self.tape.values(self.attention.v)
        out = self.tape.values(self.attention.out)
        events = [mixing.event for mixing in self.attention.mixings]
        dtype = events[0].values.dtype
        clean = p.nan_to_num(0)
        allowed = (clean.abs() @ v.abs()) * rounding(dtype, p.shape[-1])
        allowed = allowed + (
            1e-5 * v.abs().amax((-2, -1), keepdim=True) if any(event.inside for event in events) else 0
        )
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        check = close("equals p v in float64", out.to(kind), p @ v, allowed)
        letters = {**self.writer.pairs, Coordinate.WIDTH: self.writer.value_letter}
        usual = ("B", "H", "Q", self.writer.value_letter)
        result, dtype = self.writer.result_of(events, self.attention.out, letters, usual)
        notes = [f"the code computes {self.writer.describe_loop()} one by one"] if self.writer.is_loop else []
        if torch.equal(self.attention.v, self.attention.k) and self.attention.v.shape == self.attention.k.shape:
            notes.append("the values are the keys")
        self.writer.add(
            4, "head outputs", result, dtype, equation="o[i] = Σⱼ p[i, j] v[j]", events=events, check=check, notes=notes
        )


def _entry_of_others(attention: Arrangement) -> tuple[int, int] | None:
    """Return a batch entry whose keys are the tokens of another, and that one; None without any."""
    queries, keys = (
        [set(row) for row in x.tolist()] if bool((x >= 0).all()) else []
        for x in (attention.query_token, attention.key_token)
    )
    for entry, own in enumerate(keys):
        for other, tokens in enumerate(queries):
            if own == tokens and other != entry and queries[entry] != own:
                return entry, other
    return None
