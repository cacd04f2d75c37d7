"""The modules of a model are listed again only if it was edited."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from headscope import watch
from headscope._intercept import list_modules, module_tree, tree_of


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.gate = nn.Linear(3, 3), None
        self.register_module("empty", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.shared = self.first
        self.more = nn.ModuleList([Inner(), nn.Linear(3, 3)])
        self.pair = nn.ModuleList([nn.Sequential(), nn.Sequential(Inner())])


class Other(Inner):
    pass


def swap(model: Any) -> None:
    model.first, model.second = model.second, model.first


def rename(model: Any) -> None:
    model.third = model.second
    del model.second


def move(model: Any) -> None:
    """Change which module holds a child, and neither the names of all children nor their order."""
    model.pair[0].add_module("0", model.pair[1][0])
    del model.pair[1][0]


EDITS: dict[str, Callable[[Any], object]] = {
    "replaced": lambda model: setattr(model, "second", Inner()),
    "replaced inside": lambda model: setattr(model.more[0], "proj", Inner()),
    "a leaf of torch replaced": lambda model: setattr(model.first, "proj", nn.Linear(3, 3)),
    "added": lambda model: setattr(model.more[0], "late", Inner()),
    "added to a leaf of torch": lambda model: model.more[1].add_module("late", Inner()),
    "declared, then there": lambda model: setattr(model.first, "empty", Inner()),
    "removed": lambda model: delattr(model, "second"),
    "removed from a list": lambda model: model.more.pop(0),
    "swapped": swap,
    "renamed": rename,
    "moved": move,
    "no longer shared": lambda model: setattr(model, "shared", Inner()),
    "another class": lambda model: setattr(model.second, "__class__", Other),
    "parametrised": lambda model: parametrize.register_parametrization(model.first.proj, "weight", Inner()),
}


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models whose modules were listed."""
    listed: list[nn.Module] = []

    def note(model: nn.Module) -> dict[str, nn.Module]:
        listed.append(model)
        return list_modules(model)

    monkeypatch.setattr(module_tree, "list_modules", note)
    return listed


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_model_is_listed_again(edit: Callable[[Any], object], listings: list[nn.Module]) -> None:
    model = Model()
    before = tree_of(model)
    assert before.is_unchanged()
    edit(model)
    assert not before.is_unchanged()
    now = tree_of(model)
    assert listings == [model, model]
    assert now.is_unchanged()
    assert [*now.named.items()] == [*list_modules(model).items()]


def test_an_unedited_model_is_listed_once(listings: list[nn.Module]) -> None:
    model = Model()
    trees = [tree_of(model) for _ in range(3)]
    assert listings == [model]
    for tree in trees:
        assert tree.root is model
        assert [*tree.named.items()] == [*list_modules(model).items()]
    trees[0].named.clear()
    assert tree_of(model).named == trees[1].named, "each has its own names"


def test_attributes_that_are_not_modules_are_no_edit(listings: list[nn.Module]) -> None:
    model: Any = Model()
    tree_of(model)
    model.first.proj.weight = nn.Parameter(torch.zeros(3, 3))
    model.number = 3
    tree_of(model)
    assert listings == [model]


def test_a_module_in_place_of_one_that_no_longer_exists_is_another_one(listings: list[nn.Module]) -> None:
    model: Any = Model()
    for count in range(1, 20):  # a new module may lie where the old one did
        assert tree_of(model).named["second"] is model.second
        assert len(listings) == count
        del model.second
        model.second = Inner()


def test_a_tree_keeps_neither_a_model_nor_a_replaced_module_alive() -> None:
    model: Any = Model()
    model.first.around = [model]  # a module that refers to its model
    tree_of(model)
    replaced, whole = weakref.ref(model.second), weakref.ref(model)
    model.second = Inner()
    gc.collect()
    assert replaced() is None
    del model
    gc.collect()
    assert whole() is None


def test_a_module_that_is_replaced_between_two_watches_is_recorded() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, batch_first=True))
    x = torch.randn(1, 4, 8)
    for layer in (model[0], nn.TransformerEncoderLayer(8, 4, batch_first=True)):
        model[0] = layer
        with watch(model) as seen:
            model(x)
        assert seen.layers == ("0.self_attn",)
        assert seen.heads == layer.self_attn.num_heads
