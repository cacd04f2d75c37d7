"""The modules of a model with their names, remembered until the model is edited.

To list them takes as long as attending to a short text, and a watch may be opened for each forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from weakref import WeakKeyDictionary, ref

from torch import nn

from headscope._intercept.module_names import children_of, list_modules

_keys, _values = methodcaller("keys"), methodcaller("values")


@dataclass(frozen=True, slots=True)
class _Children:
    """Of each module its class and the number of its children, and of all children names and identities."""

    classes: list[type[nn.Module]]
    counts: list[int]
    names: list[str]
    ids: list[int]


def _children_of(modules: Sequence[nn.Module]) -> _Children:
    children = [vars(module)["_modules"] for module in modules]  # as ``children_of``, without a call for each
    counts = [*map(len, children)]
    held = [each for each in children if each]  # by the counts, those of the same modules
    # maps, not loops: this is done several times for each watch
    names, inside = chain.from_iterable(map(_keys, held)), chain.from_iterable(map(_values, held))
    return _Children([*map(type, modules)], counts, [*names], [*map(id, inside)])


class ModuleTree:
    """The modules of a model, as they were when they were listed.

    Attributes:
        root: the model.
        named: the result of ``list_modules``.
    """

    def __init__(self, modules: list[nn.Module], children: _Children, named: dict[str, nn.Module]) -> None:
        self.root = modules[0]
        self.named = named
        self._modules = modules  # also those without a name; as they live, another module has another identity
        self._children = children

    def is_unchanged(self) -> bool:
        """Return whether no module was replaced, added, removed, renamed or given another class since.

        The model is the same. Where a module has the same children, theirs are compared, so nothing inside is left out.
        """
        return _children_of(self._modules) == self._children

    def weakly(self) -> _WeakTree:
        """Return the tree without references that keep modules alive."""
        places = {id(module): place for place, module in enumerate(self._modules)}
        named = [places[id(module)] for module in self.named.values()]
        return _WeakTree([ref(module) for module in self._modules], self._children, [*self.named], named)


@dataclass(frozen=True, slots=True)
class _WeakTree:
    """A tree whose modules may go: those with names are numbered."""

    modules: list[ref[nn.Module]]
    children: _Children
    names: list[str]
    named: list[int]

    def tree(self) -> ModuleTree | None:
        """Return the tree; None: some module no longer exists, so its identity may be another one's."""
        modules = [module for reference in self.modules if (module := reference()) is not None]
        if len(modules) < len(self.modules):
            return None
        named = zip(self.names, map(modules.__getitem__, self.named), strict=True)
        return ModuleTree(modules, self.children, dict(named))


_trees: WeakKeyDictionary[nn.Module, _WeakTree] = WeakKeyDictionary()


def tree_of(model: nn.Module) -> ModuleTree:
    """Return the modules of a model: as an earlier call has listed them, if they are unchanged."""
    before = _trees.get(model)
    tree = None if before is None else before.tree()
    if tree is None or not tree.is_unchanged():
        modules = _modules_of(model)
        tree = ModuleTree(modules, _children_of(modules), list_modules(model))
        _trees[model] = tree.weakly()
    return tree


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the model and all modules inside, each once, also those that ``list_modules`` leaves out."""
    found: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += children_of(module).values()
    return [*found.values()]
