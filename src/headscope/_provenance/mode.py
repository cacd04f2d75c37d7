"""The mode under which a forward pass is followed, whoever wrote it.

Beside every tensor there lies a shadow of the same storage: for each number, the id of the number it was made from, and
the factor by which it was scaled since. Views share a storage and so a shadow. A wrong ``view`` therefore shows: the
names and shapes that the code assumes are not used. Three kinds of operations make new ids: a product with weights (a
projection: which token, which row of the weights), a product of projections (scores: which pair of tokens), and a
product of such pairs with projections (the outputs of the heads).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headscope._provenance.arguments import (
    FACTORIES,
    MOVES,
    REDUCTIONS,
    list_tensors,
)
from headscope._provenance.definition import FUSED_ATTENTION, define_fused_attention
from headscope._provenance.elementwise import follow_elementwise, follow_in_place, follow_move, follow_reduction
from headscope._provenance.identities import Identities, Origin
from headscope._provenance.products import copy_operand, follow_convolution, record_product
from headscope._provenance.record import INPUT, Provenance
from headscope._provenance.shadows import is_followed
from headscope._support.operation_mode import OperationMode
from headscope._support.torch_operations import PRODUCTS, is_composite


class ProvenanceMode(OperationMode):
    """Records where the numbers of a forward pass come from, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._identities = Identities()

    @property
    def record(self) -> Provenance:
        """The record of the operations so far."""
        return self._identities.record

    def ids(self, x: Tensor) -> Tensor | None:
        """Return the ids of the numbers of a tensor, in its shape; None where nothing is known of it."""
        return self._identities.shadows.ids(x)

    def belongs_to_token(self, x: Tensor) -> bool:
        """Return whether each row of a tensor is of one token: queries, keys, values or outputs."""
        ids = self.ids(x)
        return ids is not None and bool(ids.any()) and not self.record.holds_scores(ids)

    def add_input(self, x: Tensor, tokens: Tensor) -> None:
        """Register an input; ``tokens`` has the shape of x without its last axis."""
        if self.ids(x) is None:
            self._identities.assign_new(
                x, Origin(INPUT, tokens[..., None], self._identities.number("input", x.shape[-1]))
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == FUSED_ATTENTION:
            return self._follow_fused_attention(func, args, kwargs)
        if is_composite(func):  # beneath autograd, where a composed operation arrives whole
            with self:
                return func.decompose(*args, **kwargs)
        sources = [x for x in list_tensors(args, kwargs) if x in self._identities.shadows]
        operands = None
        if sources and name in PRODUCTS:
            left, right = PRODUCTS[name](args)
            operands = (copy_operand(self._identities, left), copy_operand(self._identities, right))
        out = func(*args, **kwargs)
        if operands is not None:
            record_product(self._identities, out, *operands)
        elif sources and name == "convolution":
            follow_convolution(self._identities, out, args)
        elif name.endswith("_") and not name.startswith("_") and isinstance(out, Tensor):
            follow_in_place(self._identities, name, out, args)
        elif sources:
            self._follow(name, func, out, args, kwargs, sources)
        elif name in FACTORIES and isinstance(out, Tensor):
            self._identities.shadows.create(out)
        return out

    def _follow(
        self, name: str, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sources: list[Tensor]
    ) -> None:
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, Tensor) or not is_followed(first):
            return
        if first in self._identities.shadows:
            return  # a view
        if name in MOVES:
            follow_move(self._identities, func, first, args, kwargs)
        elif name not in REDUCTIONS:
            follow_elementwise(self._identities, name, first, args, sources)
        elif name in ("mean", "sum"):
            follow_reduction(self._identities, first, args)

    def _follow_fused_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch's fused attention for its other results, and its definition for the output."""
        self.record.fused_calls += 1
        _, *rest = func(*args, **kwargs)
        with self:
            return (define_fused_attention(args, kwargs), *rest)
