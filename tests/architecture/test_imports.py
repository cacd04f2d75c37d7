"""What an import loads, and that every public name is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module

import pytest

import headscope

NOT_NEEDED = ("matplotlib", "tokenizers", "jinja2", "rich", "click", "PIL", "safetensors", "transformers", "sklearn")


def loaded(code: str, before: str = "") -> set[str]:
    """The modules that code loads in a fresh interpreter, where other code has run before."""
    code = f"{before}\nimport sys, json; there = set(sys.modules)\n{code}"
    code += "\nprint(json.dumps(sorted(set(sys.modules) - there)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy() -> None:
    modules = loaded("import headscope")
    assert not modules & {*NOT_NEEDED, "torch", "numpy"}, modules & {*NOT_NEEDED, "torch", "numpy"}
    assert {name for name in modules if name.startswith("headscope")} == {"headscope"}


def test_the_command_line_loads_next_to_nothing_before_it_catches_ctrl_c() -> None:
    modules = loaded("import headscope.cli", before="import headscope, signal, warnings")
    assert modules == {"headscope.cli", "headscope.cli._main"}


def test_attention_loads_torch_and_nothing_else_of_weight() -> None:
    """A first call loads modules of headscope, of the standard library, and what counts flops."""
    call = "import torch; q = torch.zeros(1, 1, 2, 4)"
    ours = "from headscope import attention, masks, MultiHeadAttention; attention(q, q, q, mask=masks.causal())"
    ours += "; MultiHeadAttention(4, 2)(q[0], mask=masks.Prefix(1))"
    extra = loaded(ours, before=call)
    assert {"headscope.functional", "headscope.module"} <= extra
    extra -= {"torch.utils.flop_counter", "torch.utils.module_tracker"}  # two milliseconds
    assert {name.split(".")[0] for name in extra} - sys.stdlib_module_names == {"headscope"}, extra


def test_watching_waits_for_transformers_until_a_model_brings_it() -> None:
    code = "import torch, headscope; m = headscope.MultiHeadAttention(4, 2)\n"
    modules = loaded(f"{code}with headscope.watch(m): m(torch.zeros(1, 3, 4))")
    assert "headscope.watching" in modules
    assert not modules & {"transformers", "safetensors", "pandas", "tensorboard", "wandb"}


@pytest.mark.parametrize("name", headscope.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(headscope, name) is not None
    assert name in dir(headscope)
    assert getattr(headscope, name) is getattr(headscope, name), "resolved once"


@pytest.mark.parametrize(
    "name",
    [
        *("functional", "masks", "positions", "cache", "module", "tracing", "stats", "watching", "examples"),
        *("decisions", "comparing", "heads", "survey"),
        *("layouts", "nn_compat", "checking", "onnx"),
    ],
)
def test_every_public_name_of_a_module_has_a_docstring(name: str) -> None:
    module = import_module(f"headscope.{name}")
    for public in module.__all__:
        assert getattr(module, public).__doc__, f"{name}.{public} has no docstring"


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"module 'headscope' has no attribute 'atention'; it has .*attention"):
        headscope.atention  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_trace_is_the_function() -> None:
    """Not a module of that name, whatever was imported before."""
    import headscope.tracing

    assert headscope.trace is headscope.tracing.trace
    assert callable(headscope.trace)


def test_the_version_follows_pep_440() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+|\.dev\d+)?", headscope.__version__)
