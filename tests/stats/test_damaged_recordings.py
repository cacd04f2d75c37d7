"""Damaged recordings: loading one raises a single clear error, or all that one does with a recording works."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import headscope
from headscope import HeadStats, Observe, Recording, decisions, masks, observe, watch
from headscope.comparing import compare
from headscope.report.viewer import render_recording
from support.commands import Run
from support.recording_files import without_checksums

Tensors = dict[str, Tensor]
Entries = dict[str, Any]
Damage = Callable[[Tensors, Entries], object]


class Both(nn.Module):
    """A layer of self-attention, then one of cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = headscope.MultiHeadAttention(12, 3), headscope.MultiHeadAttention(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x), x[:, :4])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with all that there can be."""
    torch.manual_seed(0)
    options: Any = {"map": 3, "edges": 3, "top": 2, "windows": (1, 2), "keep_rows": True, "keep_qk": True}
    model, what = Both().eval(), Observe(**options, weights=(0, 1))
    ids = torch.arange(7) % 3
    with torch.no_grad(), watch(model, what=what, texts=list("abcdefg"), tokens=ids, kinds={"b": "cross"}) as seen:
        model(torch.randn(1, 7, 12))
    return seen.save(tmp_path_factory.mktemp("whole") / "whole.safetensors", qk=True)


def damaged(whole: Path, path: Path, damage: Damage) -> Path:
    """A copy of a recording, as a file without checksums, whose tensors or header entries were changed."""
    with safe_open(whole, framework="pt") as file:
        tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        entries: Entries = {name: json.loads(entry) for name, entry in without_checksums(file.metadata()).items()}
    damage(tensors, entries)
    save_file(tensors, path, {name: json.dumps(entry) for name, entry in entries.items()})
    return path


def use(path: Path, good: Recording) -> None:
    """Do all that one does with a recording; documented refusals are left alone."""
    recording = Recording.load(path)
    stats = recording.stats
    with Console(width=100).capture():
        Console(width=100).print(recording.table(names=stats.names))
    json.dumps(recording.to_dict(), allow_nan=False)
    recording.flat()
    render_recording(recording)
    for decide in (decisions.patterns, decisions.streaming_heads, decisions.near_duplicates, decisions.kv_budget):
        refused_or_done(lambda decide=decide: decide(recording).to_dict())
    refused_or_done(lambda: compare(recording, good).to_dict())
    refused_or_done(lambda: stats.merge(good.stats))
    refused_or_done(lambda: stats[0].tile(0, 7, 0, 7))
    refused_or_done(lambda: stats[0].weights_of(1))


def refused_or_done(do: Callable[[], object]) -> None:
    with suppress(ValueError):
        do()


def without(layer: int, *names: str) -> Damage:
    """Row quantities are neither listed nor there."""

    def damage(tensors: Tensors, entries: Entries) -> None:
        listed: list[str] = entries["headscope.stats"]["layers"][layer]["moments"]
        for name in names:
            listed.remove(name)
            for each in [each for each in tensors if each.startswith(f"{layer}/moments/{name}/")]:
                del tensors[each]

    return damage


def renamed(name: str, new: str) -> Damage:
    def damage(tensors: Tensors, entries: Entries) -> None:
        listed: list[str] = entries["headscope.stats"]["layers"][0]["moments"]
        listed[listed.index(name)] = new
        for each in [each for each in tensors if each.startswith(f"0/moments/{name}/")]:
            tensors[each.replace(f"/{name}/", f"/{new}/")] = tensors.pop(each)

    return damage


def filled(name: str, value: float) -> Damage:
    def damage(tensors: Tensors, _: Entries) -> None:
        tensors[name].view(-1)[-1:] = value

    return damage


def moved(name: str, value: float) -> Damage:
    """Every row of the last head has this value."""

    def damage(tensors: Tensors, _: Entries) -> None:
        for what, number in (("mean", value), ("M2", 0), ("min", value), ("max", value)):
            tensors[f"{name}/{what}"][-1] = number

    return damage


def emptied(name: str) -> Damage:
    """No row of the last head has it, though there are a mean, an M2, a min and a max."""

    def damage(tensors: Tensors, _: Entries) -> None:
        tensors[f"{name}/count"][-1] = 0
        tensors[f"{name}/histogram"][-1] = 0

    return damage


def kept(*names: str) -> Damage:
    return lambda _, entries: entries["headscope.stats"]["layers"][0].update(kept=[list(names)])


def about(**changes: Any) -> Damage:
    return lambda _, entries: entries["headscope.recording"]["about"].update(changes)


def run_texts(entry: Any) -> Damage:
    return lambda _, entries: entries["headscope.recording"].update(run_texts=entry)


def alarm(**changes: Any) -> Damage:
    whole = {"step": 0, "layer": "a", "head": 0, "what": "rising sink", "value": 0.5, "limit": 0.3, "reference": 0.1}
    return lambda _, entries: entries["headscope.recording"].update(alarms=[{**whole, **changes}])


REFUSED: dict[str, tuple[Damage, str]] = {
    "no entropy": (without(0, "entropy"), "layer a: row quantities are missing: entropy; expected together with lse, "),
    "no mass": (without(0, "mass"), "layer a: row quantities are missing: mass; expected together with lse, "),
    "no normalized entropy": (without(1, "normalized_entropy"), "layer b: row quantities are missing: normalized_ent"),
    "several": (without(0, "lse", "mass", "max_weight"), "row quantities are missing: lse, max_weight, mass; expected"),
    "no window": (without(0, "window_2"), "row quantities are missing: window_2; expected together with"),
    "no chance": (without(0, "chance"), "row quantities are missing: chance; expected together with"),
    "no number": (renamed("window_1", "window_x"), "layer a: row quantity window_x: expected a distance in its name"),
    "no finite number": (renamed("window_1", "window_inf"), "row quantity window_inf: expected a distance in its name"),
    "another spelling": (renamed("window_1", "window_01"), "row quantity window_01: expected a distance in its name"),
    "listed twice": (
        lambda _, entries: entries["headscope.stats"]["layers"][0]["moments"].append("mass"),
        "row quantity mass is listed twice",
    ),
    "keys without weights": (kept("top_keys"), "kept/0: top_weights is missing; expected together with top_keys"),
    "infinite entropy": (filled("0/kept/0/values/entropy", math.inf), "0/kept/0/values/entropy: holds inf"),
    "NaN in the map": (
        filled("0/map/scale", math.nan),
        "0/map/scale: holds nan to nan, outside the possible range",
    ),
    "a weight of 2": (filled("0/edges/p", 2), "0/edges/p: expected weights, or sums of them, of at most 1, got 2"),
    "NaN edge": (filled("0/edges/p", math.nan), "0/edges/p: expected weights, or sums of them, of at most 1, got nan"),
    "too much received": (
        filled("1/received", 1e300),
        r"1/received: expected weights, or sums of them, of at most 7, got 1e\+300",
    ),
    "too much in a bin": (filled("0/map/scale", 2), "0/map/(sum|max): expected weights, or sums of them, of at most"),
    "infinite scale": (filled("0/map/scale", math.inf), "0/map/scale: holds .* to inf, outside the possible range"),
    "chance of 0": (filled("0/moments/chance/min", 0), "0/moments/chance/min: is not possible for any rows"),
    **{
        f"{what} of {value}": (
            filled(f"0/moments/lse/{what}", value),
            f"0/moments/lse/{what}: is not possible for any rows",
        )
        for what in ("mean", "M2", "min", "max")
        for value in (math.nan, math.inf, -math.inf)
    },
    "M2 beyond the range": (filled("0/moments/mass/M2", 1e3), "0/moments/mass/M2: is not possible for any rows"),
    "mean below the least": (filled("0/moments/mass/mean", 0.5), "0/moments/mass/mean: is not possible for any rows"),
    **{
        f"{name} of {value}": (
            moved(f"0/moments/{name}", value),
            f"0/moments/{name}/m(in|ax): is not possible for any rows",
        )
        for name, value in {
            "entropy": -0.5,
            "normalized_entropy": 2,
            "max_weight": 1.5,
            "effective_keys": 0.5,
            "mass": -1,
            "first": 2,
            "distance": -1,
            "self": 1.5,
            "window_1": 1.5,
            "streaming_2": -1,
            "duplicate": 2,
            "value_norm": -1,
        }.items()
    },
    "numbers of no row": (emptied("0/moments/duplicate"), "0/moments/duplicate/min: is not possible for any rows"),
    "an edge of no place": (filled("0/edges/at", -1), "0/edges/at: expected -1 where there is no weight, and only"),
    "a negative edge": (filled("0/edges/p", -0.5), "0/edges/p: holds -0.5"),
    "a kept weight of 2": (
        filled("0/kept/0/values/max_weight", 2),
        "0/kept/0/values/max_weight: holds 2, expected -0.001 to 1.001",
    ),
    "a kept infinity": (filled("0/kept/0/values/lse", -math.inf), "0/kept/0/values/lse: holds -inf, expected"),
    "a row that does not count": (
        filled("0/kept/0/counted", False),
        "0/kept/0/values/.*: got a (number|key) in a row that does not count",
    ),
    "other widths": (
        lambda _, entries: entries["headscope.origin"]["layers"]["a"].update(widths=[5, 4]),
        "layers: a has heads of width 5, expected 4 as q and k have",
    ),
    "a width too few": (
        lambda _, entries: entries["headscope.origin"]["layers"]["a"].update(widths=[4]),
        "widths: got 1 numbers, expected 2",
    ),
    "an origin of no layer": (
        lambda _, entries: entries["headscope.origin"]["layers"].update(z=entries["headscope.origin"]["layers"]["a"]),
        "layers: got z, expected names of the layers",
    ),
    "heads of a part in the wrong order": (
        lambda _, entries: entries["headscope.origin"]["layers"]["a"].update(
            part={"of": 4, "holder": "rank 1", "heads": [3, 2]}
        ),
        r"heads: got \[3, 2\], expected the first head and the one after the last",
    ),
    "half precision": (
        lambda tensors, _: tensors.update({"0/received": tensors["0/received"].bfloat16()}),
        "0/received: got torch.bfloat16, expected float32 or float64",
    ),
    "no such kind": (about(kinds={"a": "x"}), 'kinds: layer a is \'x\', expected "self" or "cross"'),
    "no version": (about(versions={"torch": math.nan}), "torch: got float, expected str"),
    "no alarm of a head": (alarm(head=-1), "head: got -1, expected 0 to "),
    "no name of an alarm": (alarm(what=None), "what: got NoneType, expected str"),
    "NaN alarm": (alarm(value=math.nan), "alarms: got .*, expected numbers"),
    "no such text of a run": (run_texts({"texts": ["a"], "ids": [[0, 1]]}), "run_texts: expected numbers of 1 texts"),
    "no texts of runs": (run_texts({"texts": [3], "ids": []}), "texts: "),
    "runs without tokens": (run_texts({"texts": ["a"], "ids": [0]}), "ids: "),
    "NaN option": (about(options={"windows": [math.nan]}), "options: got nan, expected finite numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_or_cannot_be_is_one_clear_error(name: str, whole: Path, run: Run) -> None:
    damage, message = REFUSED[name]
    path = damaged(whole, Path("seen.safetensors"), damage)
    with pytest.raises(ValueError, match=rf"^seen.safetensors: is damaged: .*{message}"):
        Recording.load(path)
    ran = run("report", "seen.safetensors")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith("headscope report: RECORDING: seen.safetensors: is damaged: ")


def test_a_layer_without_derived_quantities_is_whole(whole: Path, tmp_path: Path) -> None:
    gone = ("first", "distance", "self", "previous", "streaming_1", "streaming_2", "chance", "duplicate", "induction")
    use(damaged(whole, tmp_path / "seen.safetensors", without(0, *gone)), Recording.load(whole))


def drawn(number: int) -> Damage:
    """A damage by chance, to one tensor or one entry of the header."""
    dice = random.Random(number)

    def damage(tensors: Tensors, entries: Entries) -> None:
        name = dice.choice(sorted(tensors))
        x = tensors[name]
        match dice.randrange(6):
            case 0:
                tensors[name] = x[..., : x.shape[-1] // 2].contiguous()
            case 1:
                tensors[name] = x.to(dice.choice([torch.float32, torch.int32, torch.bfloat16, torch.bool]))
            case 2:
                value = dice.choice([-1, 0, 1, 2**40] if not x.is_floating_point() else [math.nan, math.inf, -1, 0])
                x.view(-1)[dice.randrange(x.numel())] = value
            case 3:
                other = dice.choice(sorted(tensors))
                tensors[name], tensors[other] = tensors[other].clone(), x.clone()
            case _:
                spoil(entries[dice.choice(sorted(entries))], dice)

    return damage


def spoil(held: Any, dice: random.Random) -> None:
    """Drop one entry of a nested header, or set it to something else."""
    while True:
        at = dice.choice(sorted(held) if isinstance(held, dict) else range(len(held)))
        if isinstance(held[at], (dict, list)) and held[at] and dice.random() < 0.8:
            held = held[at]
            continue
        if dice.random() < 0.3:
            del held[at]
        else:
            held[at] = copy.copy(dice.choice([None, True, -1, 10**30, 1.5, "", "x", "<b>\0", "window_x", [], {}, [[]]]))
        return


def test_damage_by_chance_is_refused_or_does_no_harm(whole: Path, tmp_path: Path) -> None:
    good, path = Recording.load(whole), tmp_path / "seen.safetensors"
    errors: list[str] = []
    for number in range(60):
        damaged(whole, path, drawn(number))
        try:
            use(path, good)
        except ValueError as error:
            errors.append(str(error))
    assert 20 < len(errors) < 60, "both kinds are there"
    assert [error for error in errors if not error.startswith(f"{path}: ") or "\n" in error] == []


def test_bytes_that_are_missing_or_others_are_one_clear_error(whole: Path, tmp_path: Path) -> None:
    good, content, path = Recording.load(whole), whole.read_bytes(), tmp_path / "seen.safetensors"
    header, dice = 8 + int.from_bytes(content[:8], "little"), random.Random(0)
    places = [0, 3, 7, 8, 9, header - 1, *(dice.randrange(header) for _ in range(30))]
    variants = [content[:n] for n in places] + [content[:n] + b"\xff" + content[n + 1 :] for n in places] + [b""]
    errors: list[str] = []
    for variant in variants:
        path.write_bytes(variant)
        try:
            use(path, good)
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) >= 60
    assert [error for error in errors if not error.startswith(f"{path}: ") or "\n" in error] == []


def test_numbers_whose_sums_overflow_are_no_damage(tmp_path: Path) -> None:
    q, k = torch.randn(2, 1, 2, 9, 4, dtype=torch.float64)
    lowest = torch.full((2, 9, 9), torch.finfo(torch.float64).min, dtype=torch.float64)
    calls: list[dict[str, Any]] = [
        {"q": q * 1e200, "k": k * 1e100},
        {"q": q * 0, "k": k, "bias": lowest, "sinks": torch.zeros(2, dtype=torch.float64)},
        {"q": q, "k": k, "v": k * 1e300},
    ]
    for number, options in enumerate(calls):
        stats = observe(**options, what=Observe(map=3, edges=2, top=2, keep_rows=True))
        assert stats.broken.sum() == 0
        again = HeadStats.load(stats.save(tmp_path / f"{number}.safetensors"))
        assert torch.equal(again["max_logit"].max, stats["max_logit"].max)
    assert not observe(q * 1e200, k * 1e100, what=Observe())[0, 0, "max_logit"].std < math.inf


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "sinks", "bias"])
def test_rows_that_hold_nan_or_infinity_are_no_damage(where: str, spoilt: float, tmp_path: Path) -> None:
    options: dict[str, Any] = {name: torch.randn(1, 2, 6, 4) for name in "qkv"}
    options |= {"sinks": torch.zeros(2), "bias": torch.zeros(2, 6, 6)}
    options[where].view(-1)[-3:] = spoilt
    what = Observe(map=3, edges=40, top=2, keep_rows=True, windows=(2,), tokens=torch.arange(6) % 3)
    stats = observe(**options, mask=masks.causal(), what=what)
    again = HeadStats.load(stats.save(tmp_path / "stats.safetensors"))
    assert torch.equal(again.broken, stats.broken)
