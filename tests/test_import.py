"""What an import loads, and that every public name is there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

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
    assert loaded("import headscope.cli", before="import headscope, signal, warnings") == {"headscope.cli"}


def test_attention_loads_torch_and_nothing_else_of_weight() -> None:
    """Beside what ``import torch`` loads itself, a first call loads ours alone."""
    call = "import torch; q = torch.zeros(1, 1, 2, 4)"
    ours = "from headscope import attention, masks, MultiHeadAttention; attention(q, q, q, mask=masks.causal())"
    ours += "; MultiHeadAttention(4, 2)(q[0], mask=masks.Prefix(1))"
    extra = loaded(ours, before=call)
    assert {"headscope.functional", "headscope.module"} <= extra
    assert {name.split(".")[0] for name in extra} == {"headscope"}, extra


def test_watching_waits_for_transformers_until_a_model_brings_it() -> None:
    code = "import torch, headscope; m = headscope.MultiHeadAttention(4, 2)\n"
    modules = loaded(f"{code}with headscope.watch(m): m(torch.zeros(1, 3, 4))")
    assert "headscope.watching" in modules
    assert not modules & {"transformers", "safetensors", "pandas", "tensorboard", "wandb"}


CORE = [
    *(
        "_files",
        "_escapes",
        "_json",
        "_cpuinfo",
        "_onlookers",
        "_tensor_classes",
        "_fingerprint",
        "masks",
        "_call",
        "_backends",
        "_select",
        "_nonfinite",
        "_operator",
    ),
    *(
        "_dense_stats",
        "_stats_origin",
        "_stats_parts",
        "stats",
        "_stats_show",
        "_kept_weights",
        "_stats_checks",
        "_stats_files",
    ),
    *(
        "_observe_scene",
        "_observe_tile",
        "_observe_places",
        "_observe_bins",
        "_observe_edges",
        "_observe",
        "_observe_native",
        "_observe_sums",
    ),
    *("functional", "_uncompiled", "onnx", "_linear", "positions", "cache", "_nested", "_pruning"),
    *("_module_options", "module"),
    *("_decision_parts", "_head_distances", "_pattern_means", "decisions", "comparing"),
    *("_layout_table", "_layout_export", "layouts", "nn_compat"),
    *(
        "_watch_compiled",
        "_watch_masks",
        "_watch_softmax",
        "_watch_calls",
        "_watch_torch",
        "_watch_layers",
        "_watch_edits",
        "_watch_frames",
        "_watch_tokens",
        "_watch_monitor",
        "_watch_origin",
        "_watch_options",
    ),
    *("_watch_transformers", "watching", "_watch_files", "heads"),
    *("_check_words", "_check_findings", "_check_show", "_check_tap", "_check_heads", "_check_calls", "_check_weights"),
    *("_check_case", "_check_probes", "_check_masks", "_check_range", "checking", "_check_child"),
]
LATER = {
    "_operator": {"_uncompiled"},
    "functional": {"_uncompiled"},
    "module": {"layouts"},
    "stats": {"_stats_show", "_stats_files"},
    "watching": {"_watch_files", "report"},
    "_check_findings": {"_check_show"},
}  # imported when they are called: they are made of what is in it


@pytest.mark.parametrize("room", CORE)
def test_imports_go_one_way(room: str) -> None:
    """A room of the core imports from those before it in the list, or from itself, also inside its functions."""
    place = Path(headscope.__file__).parent
    files = [place / f"{room}.py"] if (place / f"{room}.py").exists() else sorted((place / room).glob("*.py"))
    allowed = {*CORE[: CORE.index(room) + 1], "__version__", *LATER.get(room, ())}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "headscope":
                below = (node.module or "").split(".")[1:]
                names = [below[0]] if below else [alias.name for alias in node.names]
            assert set(names) <= allowed, f"{file.name} imports {names}"


@pytest.mark.parametrize("name", headscope.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(headscope, name) is not None
    assert name in dir(headscope)
    assert getattr(headscope, name) is getattr(headscope, name), "resolved once"


@pytest.mark.parametrize(
    "room",
    [
        *("functional", "masks", "positions", "cache", "module", "tracing", "stats", "watching", "examples"),
        *("decisions", "comparing", "heads"),
        *("layouts", "nn_compat", "checking", "onnx"),
    ],
)
def test_every_name_of_a_room_is_there(room: str) -> None:
    module = import_module(f"headscope.{room}")
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{room}.{name} says nothing of itself"


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(AttributeError, match=r"module 'headscope' has no attribute 'atention'; it has .*attention"):
        headscope.atention  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_trace_is_the_function() -> None:
    """Not a module of that name, whatever was imported before."""
    import headscope.tracing

    assert headscope.trace is headscope.tracing.trace
    assert callable(headscope.trace)


def test_the_version_is_a_number() -> None:
    assert [part.isdigit() for part in headscope.__version__.split(".")] == [True, True, True]
