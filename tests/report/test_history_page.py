"""What Python packs into the page of a training's history: values, codes with their error, bands, and the size."""

from __future__ import annotations

import base64
import math
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headscope.report import viewer
from headscope.report._viewer import from_history
from headscope.report._viewer.from_history import CODES, NEGATIVE, NOTHING, POSITIVE, Scale
from headscope.watching import About, Alarm, Limits
from support.html_pages import Page


def history_of(values: dict[str, torch.Tensor], heads: dict[str, int], **more: Any) -> Any:
    """A history as the page takes it: quantity -> [steps, layers, heads]."""

    class Given(SimpleNamespace):
        def __getitem__(self, name: str) -> torch.Tensor:
            return values[name]

    steps = tuple(range(len(next(iter(values.values())))))
    about = About("M", {}, {"headscope": "0"}, {}, None, len(steps), len(steps))
    facts = {"about": about, "limits": Limits(), "steps": steps, "observed": len(steps), "starts": (0,), "alarms": ()}
    return Given(**{**facts, "names": tuple(values), "heads": heads, **more})


def data_of(history: Any) -> tuple[dict[str, Any], bytes]:
    """What the script of the page reads."""
    html = viewer.render_history(history)
    page = Page(html)
    blocks = html.partition('id="blocks">')[2].partition("<")[0]
    return page.data, base64.b64decode(blocks)


def block(content: bytes, place: list[int]) -> bytes:
    start, length = place
    return zlib.decompress(content[start : start + length], -15)


def decoded(content: bytes, of: dict[str, Any], layer: int, heads: int, steps: int) -> NDArray[Any]:
    """The values of a layer, [heads, steps], as the script decodes them."""
    raw = block(content, of["blocks"][layer])
    if of["bits"] == 32:
        return np.frombuffer(raw, "<f4").reshape(heads, steps).astype(np.float64)
    codes = np.frombuffer(raw, np.uint8).reshape(heads, -1).cumsum(1, dtype=np.uint8)
    u = of["low"] + (of["high"] - of["low"]) * codes.astype(np.float64) / CODES
    values = of["pivot"] * np.sinh(u) if of["scale"] == "asinh" else u
    for code, value in ((NEGATIVE, -math.inf), (POSITIVE, math.inf), (NOTHING, math.nan)):
        values[codes == code] = value
    return np.repeat(values, of["stride"], 1)[:, :steps]


def curves(steps: int, layers: int, heads: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, layers, heads, generator=generator)
    return {
        "lse": noise * 3 - 1,
        "max_logit_max": torch.exp(noise + torch.linspace(0, 9, steps)[:, None, None]),
        "entropy": (0.5 + 0.1 * noise).clamp(0, 1) * 3,
        "normalized_entropy": (0.5 + 0.1 * noise).clamp(0, 1),
    }


def test_a_small_page_holds_float32() -> None:
    values = curves(13, 2, 5)
    values["lse"][:, 1, 3:] = math.nan  # of a layer with fewer heads
    values["max_logit_max"][3, 0, 0] = math.inf
    values["entropy"][5, 1, 2] = math.nan
    data, content = data_of(history_of(values, {"m.0.attn": 5, "m.1.attn": 3}))
    assert [each["name"] for each in data["history"]["quantities"]] == [
        "normalized_entropy", "entropy", "max_logit_max", "lse",
    ]  # fmt: skip
    for of in data["history"]["quantities"]:
        for layer, heads in enumerate((5, 3)):
            wanted = values[of["name"]][:, layer, :heads].T.double().numpy()
            np.testing.assert_array_equal(decoded(content, of, layer, heads, 13), wanted)
    assert [(each["name"], each["short"]) for each in data["layers"]] == [("m.0.attn", "0"), ("m.1.attn", "1")]


def test_codes_are_as_close_as_the_page_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_history, "EXACT_VALUES", 0)
    values = curves(17, 2, 7)
    values["max_logit_max"][3, 0, 0], values["max_logit_max"][4, 0, 0] = math.inf, -math.inf
    values["lse"][5, 1, 2] = math.nan
    data, content = data_of(history_of(values, {"a": 7, "b": 7}))
    scales = {}
    for of in data["history"]["quantities"]:
        scales[of["name"]] = of["scale"]
        step = (of["high"] - of["low"]) / CODES / 2
        for layer in range(2):
            wanted = values[of["name"]][:, layer].T.double().numpy()
            found = decoded(content, of, layer, 7, 17)
            special = ~np.isfinite(wanted)
            np.testing.assert_array_equal(found[special], wanted[special])
            error, exact = np.abs(found[~special] - wanted[~special]), np.abs(wanted[~special])
            allowed = step if of["scale"] == "linear" else 1.01 * step * (exact + of["pivot"])
            assert (error <= allowed + 1e-6 * exact).all(), of["name"]
    assert scales["max_logit_max"] == "asinh"
    assert scales["normalized_entropy"] == "linear"


@pytest.mark.parametrize("values", [[math.nan, math.nan], [0.0, 0.0], [-3.0, -3.0], [math.inf, 5.0], [1e-30, 3e38]])
def test_a_scale_of_any_values(values: list[float]) -> None:
    array = np.array(values, np.float32)
    scale = Scale.of(array)
    assert scale.high > scale.low
    assert math.isfinite(scale.high)
    assert math.isfinite(scale.low)
    finite = np.isfinite(array)
    assert ((scale.codes(array) <= CODES) == finite).all()


def test_bands_are_values_of_heads() -> None:
    values = curves(11, 2, 13)
    values["normalized_entropy"][2] = math.nan
    values["normalized_entropy"][3, 0, :] = math.nan
    data, content = data_of(history_of(values, {"a": 13, "b": 13}))
    bands = {each["name"]: each["block"] for each in data["history"]["bands"]}
    assert [*bands] == ["normalized_entropy", "max_logit_max"], "entropy is drawn once"
    found = np.frombuffer(block(content, bands["normalized_entropy"]), "<f4").reshape(5, 11)
    for step in range(11):
        heads = values["normalized_entropy"][step].flatten()
        heads = heads[~heads.isnan()].sort().values
        ranks = [round(share * (len(heads) - 1)) for share in (0, 0.1, 0.5, 0.9, 1)]
        wanted = [float(heads[rank]) if len(heads) else math.nan for rank in ranks]
        np.testing.assert_array_equal(found[:, step], np.array(wanted, np.float32))


def test_a_page_that_would_be_too_large_has_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_history, "EXACT_VALUES", 0)
    monkeypatch.setattr(from_history, "MOST_BYTES", 30_000)
    values = curves(211, 3, 17) | {f"window_{n}": torch.rand(211, 3, 17) for n in range(9)}
    history = history_of(values, dict.fromkeys("abc", 17))
    data, content = data_of(history)
    assert len(content) <= 30_000 + 2 * 5 * 4 * 211
    strides = {each["name"]: each["stride"] for each in data["history"]["quantities"]}
    assert strides["normalized_entropy"] < strides["window_0"], "those with alarms have more steps"
    for of in data["history"]["quantities"]:
        wanted = values[of["name"]][:: of["stride"], 1].T.double().numpy()
        found = decoded(content, of, 1, 17, 211)[:, :: of["stride"]]
        step = (of["high"] - of["low"]) / CODES / 2 * 1.01
        assert (np.abs(found - wanted) <= step * (np.abs(wanted) + of["pivot"] if of["scale"] == "asinh" else 1)).all()
    assert "at most one of" in viewer.render_history(history)


def test_the_page_opens_on_the_first_alarm_of_the_most_serious_kind() -> None:
    values = curves(11, 2, 3)
    values["normalized_entropy"][[3, 4, 6], 1, 1] = 0.5  # the reference of the alarm at step 5
    alarms = [
        Alarm(1, "a", 2, "rising sink", 0.4, 0.3, 0.1),
        Alarm(5, "b", 1, "entropy collapse", 0.05, 0.1, 0.5),
        Alarm(4, "a", 0, "growing logits", math.inf, 100.0, 3.0),
        Alarm(7, "c", 0, "growing logits", 200.0, 100.0, 3.0),  # of a layer that has no value
    ]
    data, _ = data_of(history_of(values, {"a": 3, "b": 3}, alarms=alarms))
    assert data["opensOn"] == [1, 1]
    assert data["history"]["alarms"] == [
        [1, 0, 2, 2, 0.4, 0.3, 0.1, None], [5, 1, 1, 0, 0.05, 0.1, 0.5, 3], [4, 0, 0, 1, None, 100, 3, None],
    ], "with the step of the reference where it is stored"  # fmt: skip
    values["normalized_entropy"][4, 1, 2] = -5.0
    data, _ = data_of(history_of(values, {"a": 3, "b": 3}, limits=None))
    assert data["opensOn"] == [1, 2], "the head that changes most"
    assert (data["history"]["alarmed"], data["history"]["limits"]) == (False, {})


def test_notes_name_what_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(from_history, "MOST_ALARMS", 2)
    alarms = [Alarm(n, "a", 0, "entropy collapse", 0.05, 0.1, 0.5) for n in range(3)]
    history = history_of(curves(5, 1, 3), {"a": 3}, alarms=alarms, observed=40)
    html = viewer.save_history(history, tmp_path / "run.html").read_text(encoding="utf-8")
    notes = [note.text for note in Page(html).all("p") if "note" in str(note.attributes.get("class"))]
    assert notes == [
        "The history stores 5 of 40 observed steps, evenly spaced. Alarms are those of all steps.",
        "The page shows the first 2 of 3 alarms. The history has all of them.",
    ]
