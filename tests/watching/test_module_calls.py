"""While a watch is open, the calls of watched classes are replaced, of no others, and afterwards of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import MultiHeadAttention, watch


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class OwnCall(Attention):
    """A class with a ``__call__`` of its own, which calls that of its base."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 2


class OtherCall(Attention):
    """One that does not."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


def x() -> Tensor:
    return torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))


def calls() -> list[Any]:
    return [vars(each).get("__call__") for each in (nn.Module, nn.Linear, nn.Sequential, Attention, OwnCall, OtherCall)]


def test_only_the_classes_of_watched_modules_are_replaced() -> None:
    before = calls()
    model, other = nn.Sequential(Attention()), MultiHeadAttention(8, 2)
    with watch(model) as recording:
        assert calls()[:2] == before[:2]
        assert calls()[4:] == before[4:]
        assert calls()[2:4] != before[2:4]
        with watch(other) as beside:
            model(x())
            other(torch.randn(1, 3, 8))
        model(x())
    assert calls() == before
    assert (recording.forwards, beside.forwards) == (2, 1)


def test_a_class_with_a_call_of_its_own_is_recorded_through_it() -> None:
    before, model = calls(), nn.Sequential(OwnCall(), Attention())
    expected = model(x())
    with watch(model) as recording:
        assert torch.equal(model(x()), expected)
        with watch(model[1]) as inner:
            model(x())
    assert calls() == before
    assert recording.layers == ("0", "1")
    assert inner.layers == ("Attention",)


def test_a_call_that_other_code_has_replaced_stays() -> None:
    own = Attention.__call__

    def counted(self: nn.Module, *args: Any) -> Any:
        counts.append(type(self).__name__)
        return own(self, *args)

    counts: list[str] = []
    model = Attention()
    try:
        with watch(model) as recording:
            model(x())
            Attention.__call__ = counted
        assert vars(Attention)["__call__"] is counted
        model(x())
    finally:
        del Attention.__call__
    assert counts == ["Attention"]
    assert recording.forwards == 1


def test_a_replaced_call_of_all_modules_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    own, names = nn.Module.__call__, []

    def traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names.append(type(self).__name__)
        return own(self, *args, **kwargs)

    model = nn.Sequential(Attention())
    with watch(model) as recording, monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", traced)  # as torch.fx does while it traces
        model(x())
    assert names == ["Sequential", "Attention"]
    assert recording.layers == ("0",)


class Lazy(nn.modules.lazy.LazyModuleMixin, Attention):
    cls_to_become = OwnCall

    def initialize_parameters(self, *args: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_recorded_in_the_class_that_it_becomes() -> None:
    before, model = calls(), nn.Sequential(Lazy())
    with watch(model) as recording:
        model(x())
        assert type(model[0]) is OwnCall
        model(x())
    assert recording["0", 0, "entropy"].count == 2 * 5
    assert calls() == before


def test_a_compiled_wrapper_of_a_watched_module_is_refused_inside_another_call() -> None:
    from headscope.watching import WatchError

    model = Attention()
    compiled = torch.compile(model, backend="eager")
    unrelated = torch.compile(Attention(), backend="eager")
    with watch(model):
        assert torch.equal(unrelated(x()), model(x()))
        with pytest.raises(WatchError, match="compiled"):
            compiled(x())
    assert torch.equal(compiled(x()), model(x()))


def test_a_module_whose_class_never_calls_that_of_its_base_is_part_of_its_parent() -> None:
    model = nn.Sequential(OtherCall())
    with watch(model) as recording:
        model(x())
    assert recording.layers == ("Sequential",)
