"""check: what counts as wrong or fragile, and the arguments strict, ignore and only."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import check
from headscope.checking import CheckError, check_names
from headscope.checking._catalogue import CATALOGUE
from support.buggy.packed_projection import Packed

FRAGILE = {"nan-on-empty-row", "fp16-overflow", "softmax-overflows"}
Step = Callable[[Tensor, Tensor | None], Tensor]


class Filled(nn.Module):
    """Attention of three heads of width 8, with a step from scores and mask to weights."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (3, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o((self.step(q @ k.mT / math.sqrt(8), mask) @ v).transpose(1, 2).flatten(2))


def fill(value: float) -> Step:
    return lambda s, mask: (s if mask is None else s.masked_fill(mask == 0, value)).softmax(-1)


def divide_by_hand(s: Tensor, mask: Tensor | None) -> Tensor:
    e = s.exp() if mask is None else s.exp() * mask
    return e / e.sum(-1, keepdim=True).clamp_min(1e-30)


def hide_own_row(s: Tensor, mask: Tensor | None) -> Tensor:
    """The built-in mask hides every key of query 3."""
    hidden = torch.zeros(s.shape[-2:], dtype=torch.bool)
    hidden[3] = True
    return s.masked_fill(hidden, -math.inf).softmax(-1)


def test_every_fragile_finding_has_a_condition_and_no_other_one() -> None:
    assert {name for name, entry in CATALOGUE.items() if entry.severity == "fragile"} == FRAGILE
    assert {name for name, entry in CATALOGUE.items() if entry.condition} == FRAGILE


@pytest.mark.parametrize(
    ("step", "name", "condition"),
    [
        (fill(-math.inf), "nan-on-empty-row", "a mask hides every key of a query, as in an entry that is all padding"),
        (fill(-1e9), "fp16-overflow", "the module runs in float16, by .half() or autocast"),
        (divide_by_hand, "softmax-overflows", "a logit exceeds about 11 in float16, 88 in float32 or 709 in float64"),
    ],
)
def test_a_fragile_finding_states_its_condition_and_counts_only_if_strict(
    step: Step, name: str, condition: str
) -> None:
    findings = check(Filled(step), mask_means="keep")
    assert findings.names == (name,)
    assert (findings[name].severity, findings[name].condition) == ("fragile", condition)
    assert not findings
    assert f"! {name}  fragile\n" in str(findings)
    assert f"\n  right here; breaks if {condition}\n" in str(findings)
    assert f"<p>right here; breaks if {condition}</p>" in findings._repr_html_()
    data = findings.to_dict()
    assert (data["wrong"], data["fails"], data["strict"]) == (False, False, False)
    assert data["findings"][0]["condition"] == condition

    strict = check(Filled(step), mask_means="keep", strict=True)
    assert strict
    assert strict.names == findings.names
    assert (strict.to_dict()["wrong"], strict.to_dict()["fails"], strict.to_dict()["strict"]) == (False, True, True)


def test_the_lowest_number_is_neither() -> None:
    findings = check(Filled(fill(torch.finfo(torch.float64).min)), mask_means="keep", strict=True)
    assert findings.names == (), str(findings)


def test_an_empty_row_of_a_built_in_mask_is_wrong_under_no_condition() -> None:
    findings = check(Filled(hide_own_row))
    assert findings["nan-on-empty-row"].severity == "wrong"
    assert findings["nan-on-empty-row"].condition == ""
    assert findings


def test_unusual_and_slow_findings_never_count() -> None:
    assert not check(Packed(24, 3, bug="scale of the model"), strict=True)
    assert not check(Packed(24, 3), length=4096, strict=True, ignore="nan-on-empty-row")


class WrongCache(nn.Module):
    """Causal, with a fill that overflows float16, and a cache that halves the values of earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], -2), torch.cat([past[1] / 2, v], -2)
        s = q @ k.mT / math.sqrt(8)
        later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        return self.o((s.masked_fill(later, -1e9).softmax(-1) @ v).transpose(1, 2).flatten(2)), (k, v)


def test_a_fragile_finding_does_not_hide_a_wrong_cache() -> None:
    findings = check(WrongCache(), causal=True)
    assert findings.names == ("decoding-differs", "fp16-overflow")
    assert findings


def test_ignored_findings_are_listed_and_do_not_count() -> None:
    module = Packed(24, 3, bug="view without transpose")
    findings = check(module, ignore=["heads-split-wrong", "scale-unusual"])
    assert (findings.names, findings.omitted, bool(findings)) == ((), ("heads-split-wrong",), False)
    assert "\nomitted\n  heads-split-wrong: by ignore or only" in str(findings)
    assert "checks skipped until heads-split-wrong is fixed" in str(findings)
    assert findings.to_dict()["omitted"] == ["heads-split-wrong"]
    assert "heads-split-wrong: by ignore or only" in findings._repr_html_()


def test_only_reports_also_what_follows_from_another_finding() -> None:
    module = Packed(24, 3, bug="values are keys")
    assert check(module).names == ("values-are-keys",)
    findings = check(module, only="heads-dropped")
    assert findings.names == ("heads-dropped",)
    assert findings.omitted == ("values-are-keys",)
    both = check(module, only=("heads-dropped", "values-are-keys"))
    assert (both.names, both.omitted) == (("values-are-keys",), ())
    assert check(module, only="heads-dropped", ignore="heads-dropped").names == ()
    assert check(module, only="scale-missing").names == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("scale-mising", "got scale-mising, expected the name of a finding; did you mean scale-missing?"),
        (["mask-ignored", "zzz"], "got zzz, expected the name of a finding; they are heads-split-wrong, "),
    ],
)
def test_an_unknown_name_is_refused(names: str | list[str], message: str) -> None:
    for argument in ("ignore", "only"):
        with pytest.raises(ValueError, match=f"^{argument}: ") as raised:
            check(nn.Identity(), **{argument: names})
        assert message in str(raised.value)
    with pytest.raises(ValueError, match=r"^only: got no name, expected the name of at least one finding"):
        check(nn.Identity(), only=[])
    assert check_names("ignore", ()) == frozenset()


def test_layers_that_are_copies_of_one_are_not_the_same_projection() -> None:
    class Cloned(Filled):
        def __init__(self) -> None:
            super().__init__(fill(-1e4))
            self.k, self.v, self.o = (copy.deepcopy(self.q) for _ in range(3))

    module = Cloned()
    assert check(module, mask_means="keep").names == ()
    assert torch.equal(module.q.weight, module.k.weight)
    module.k = module.q
    assert check(module, mask_means="keep").names == ("keys-are-queries",)


def test_lazy_layers_get_their_shapes_from_a_call() -> None:
    class Lazy(Filled):
        def __init__(self) -> None:
            super().__init__(fill(-1e4))
            self.q, self.k, self.v, self.o = (nn.LazyLinear(24) for _ in range(4))

    module = Lazy()
    assert check(module, embed_dim=11, mask_means="keep").names == ()
    assert isinstance(module.q, nn.LazyLinear)
    with pytest.raises(CheckError, match="embed_dim: missing; it cannot be derived from lazy weights, which have no"):
        check(module)
    module.o = nn.LazyLinear(24)
    module.v = nn.LazyLinear(23)
    with pytest.raises(CheckError, match=r"lazy weights could not be initialised; tried first \(x\) with x \[2, 7, 11"):
        check(module, embed_dim=11)


def test_refused_findings_count_whatever_their_severity() -> None:
    module = Filled(fill(-1e9))
    findings = check(module, mask_means="keep", refuse="fp16-overflow")
    assert findings
    assert findings["fp16-overflow"].severity == "fragile"
    assert "! fp16-overflow  fragile, refused\n" in str(findings)
    assert "fragile, refused</span>" in findings._repr_html_()
    (data,) = findings.to_dict()["findings"]
    assert data["fails"]
    lines = [line.strip() for line in data["text"].split("\n")]
    assert lines[:2] == ["! fp16-overflow  fragile, refused", findings["fp16-overflow"].seen]
    assert not check(module, mask_means="keep", refuse=["scale-missing"])
    with pytest.raises(ValueError, match="refuse: got fp16, expected the name of a finding"):
        check(module, refuse="fp16")


def test_a_stated_call_of_a_class_that_requires_a_mask_gets_one_that_hides_nothing() -> None:
    class Required(Filled):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask.bool())  # None has no such method

    found = check(Required(fill(-1e4)), call=lambda module, x, mask: module(x, mask), mask_means="keep")
    assert found.names == ()
    assert found.understood[0] == "called as its own call with a mask that hides nothing with E = 24"


def test_a_causal_class_may_leave_the_mask_to_its_caller() -> None:
    module = Filled(fill(torch.finfo(torch.float64).min))
    findings = check(module, causal=True)
    assert findings.names == ("looks-into-the-future",)
    assert findings["looks-into-the-future"].severity == "wrong"
    seen = findings["looks-into-the-future"].seen
    assert seen.endswith("mask= works: leave out causal=True (--causal) if the caller passes the causal mask")
    ignoring = Filled(lambda s, mask: s.softmax(-1))
    assert "leave out" not in check(ignoring, causal=True)["looks-into-the-future"].seen


def test_swapped_number_and_width_of_heads() -> None:
    swapped = check(nn.MultiheadAttention(35, 7), heads=5)["heads-not-split"]
    assert swapped.seen == ("7 heads of width 5, expected 5 heads of width 7: number and width of heads are swapped")
    assert swapped.code.endswith("# H = 5 heads of width D = 7")
    other = check(nn.MultiheadAttention(33, 11), heads=2)["heads-not-split"]
    assert (other.seen, other.code[-7:]) == ("11 heads of width 3, expected 2", "# H = 2")
    single = check(nn.MultiheadAttention(35, 1), heads=5)["heads-not-split"]
    assert single.fix == CATALOGUE["heads-not-split"].fix
