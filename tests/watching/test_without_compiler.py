"""Attention written by hand is followed without torch's compiler, which takes a second to load."""

from __future__ import annotations

from support.forking import run_program

MODULE = """
import sys, torch, headscope
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(21, 21) for _ in range(4))
        self.compiled = None
    def forward(self, x):
        x = self.prepare(x)
        q, k, v = (f(x).unflatten(-1, (3, 7)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(((q @ k.mT / 7**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
    def prepare(self, x):
        return x

class Compiling(Attention):
    def prepare(self, x):
        if self.compiled is None:
            self.compiled = torch.compile(self.double, backend="eager")
        return self.compiled(x)
    def double(self, x):
        y = x.sin()
        print(end="")  # not compiled
        return y + x

x = torch.randn(2, 11, 21)
"""

WATCH = """
module = Attention()
with torch.no_grad(), headscope.watch(module) as recording:
    out = module(x)
assert recording["entropy"].count.tolist() == [[22] * 3]
"""
TRACE = "assert headscope.trace(Attention(), x).held"
CHECK = "assert headscope.check(Attention()).names == ()"

COMPILE_WITHIN = """
module = Compiling()
with torch.no_grad(), headscope.watch(module) as recording:
    first, second = module(x), module(x)
assert "torch._dynamo" in sys.modules
assert recording["entropy"].count.tolist() == [[44] * 3]
with torch.no_grad():
    assert torch.equal(first, module(x)) and torch.equal(second, first)
"""


def test_the_compiler_is_not_loaded() -> None:
    parts = {"watch": WATCH, "trace": TRACE, "check": CHECK}
    code = "".join(f'{code}\nassert "torch._dynamo" not in sys.modules, "{name}"\n' for name, code in parts.items())
    done = run_program(MODULE + code)
    assert done.returncode == 0, done.stderr


def test_a_module_that_compiles_while_it_is_watched() -> None:
    done = run_program(MODULE + COMPILE_WITHIN)
    assert done.returncode == 0, done.stderr
