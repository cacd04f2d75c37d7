"""Attention layers that are replaced or added while a watch is open.

A watch registers the modules of the model by identity when it is created. A call of a module inserted later has no
entry: it is attributed to the enclosing module, or not recorded. ``Layout`` detects such modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn

from headscope._intercept.intercepted_call import WatchError
from headscope._intercept.module_names import enclosing_paths, is_attention, is_attention_class
from headscope._intercept.module_tree import ModuleTree, tree_of

Choose = Callable[[Mapping[str, nn.Module]], Collection[str]]
"""Select names of modules; raises ValueError if none matches."""


class Layout:
    """The modules of a model as they were when it was first watched.

    Attributes:
        attended: names of the modules that have made an attention call so far.
    """

    def __init__(self, tree: ModuleTree, choose: Choose, who: str) -> None:
        self.modules = tree.named
        self.attended: set[str] = set()
        self._choose = choose
        self._who = who
        self._tree = tree  # the last one that was compared with the first
        self._edited = False  # an edit that does not concern an attention layer known so far

    def check(self, *, last: bool = False) -> None:
        """Compare the model with its first state; without edits this takes a few comparisons.

        Args:
            last: no forward pass follows; judge earlier edits again, by all layers that have attended meanwhile.

        Raises:
            WatchError: chosen attention layers were replaced or added.
        """
        if self._tree.is_unchanged() and not (last and self._edited):
            return
        tree = tree_of(self._tree.root)
        now = tree.named
        different = [name for name, module in now.items() if self.modules.get(name) is not module]
        if edited := self._attention(now, different):
            names = ", ".join(edited[:8]) + (f" and {len(edited) - 8} more" if len(edited) > 8 else "")
            raise WatchError(
                f"{self._who}: attention layers were replaced or added after the model was registered: {names}; their "
                "calls would be missing or attributed to another module. Edit the model first, then open a new block"
            )
        self._edited = bool(different)
        self._tree = tree

    def _attention(self, now: Mapping[str, nn.Module], different: Collection[str]) -> list[str]:
        """Return the chosen attention layers among the modules that are not those registered under their names."""
        if not different:
            return []
        unchanged = now.keys() - different
        chosen = {*self._chosen(self.modules), *self._chosen(now)}
        edited: list[str] = []
        for name in different:
            around = [other for other in enclosing_paths(name)[:-1] if other in unchanged]
            nearest = around[-1] if around else next(iter(self.modules))  # its calls are attributed to this module
            if name not in chosen and nearest not in chosen:
                continue
            if self._attends(name, now[name], around) and not self._is_wrapper(name, now[name]):
                edited.append(f"{name} ({type(now[name]).__name__})")
        return edited

    def _chosen(self, modules: Mapping[str, nn.Module]) -> Collection[str]:
        try:
            return self._choose(modules)
        except ValueError:  # no module of this name is left
            return ()

    def _attends(self, name: str, module: nn.Module, around: Collection[str]) -> bool:
        """Return whether the module, or its predecessor under the name, is known to attend: by name, class or calls."""
        if "parametrizations" in name.split("."):
            return False
        kinds = {type(self.modules[other]) for other in self.attended}
        if name in self.attended or type(module) in kinds:
            return True
        inside = any(is_attention(other, self.modules[other]) for other in around)
        attends = is_attention_class if inside else is_attention  # c_attn is a projection
        before = self.modules.get(name)
        return attends(name, module) or (before is not None and attends(name, before))

    def _is_wrapper(self, name: str, module: nn.Module) -> bool:
        """Return whether it is, or holds, the registered module: a wrapped or moved module retains its entry.

        A registered module under the name of another one is neither: layers changed places.
        """
        inside = {id(each) for each in module.modules()}
        before = self.modules.get(name)
        if before is not None:
            return id(before) in inside
        return any(id(each) in inside for each in self.modules.values())
