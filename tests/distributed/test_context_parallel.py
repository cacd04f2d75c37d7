"""Inside torch's context parallelism each rank holds a part of the sequence, and headscope raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import headscope
from headscope._attend import context_parallel
from headscope._attend.backends import native
from support.forking import run_program, run_ranks
from support.paths import PROGRAMS

RAISES = "RuntimeError: q, k, v: torch's context parallelism is active"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks report; see context_ranks.py."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    return [json.loads(out) for out in run_ranks(PROGRAMS / "context_parallel_ranks.py", str(store))]


def test_every_way_to_attend_and_to_observe_raises_inside_context_parallel(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["length"] == 8, "the context has cut the sequence"
        assert {name: text for name, text in found["inside"].items() if not text.startswith(RAISES)} == {}


def test_the_error_names_what_to_do_instead(ranks: list[dict[str, Any]]) -> None:
    text = ranks[0]["inside"]["attention"]
    assert "torch.nn.functional.scaled_dot_product_attention" in text
    assert "context_parallel_unshard" in text


@pytest.mark.parametrize("when", ["before", "after", "disabled"])
def test_outside_of_the_context_all_of_them_run(ranks: list[dict[str, Any]], when: str) -> None:
    for found in ranks:
        assert set(found[when].values()) == {"returned"}, found[when]


def test_an_enabled_dispatcher_counts_as_active(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert {name: text for name, text in found["dispatcher"].items() if not text.startswith(RAISES)} == {}


def test_tensors_cut_by_context_parallel_shard_are_warned_of_once(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert set(found["sharded"].values()) == {"returned"}
        assert len(found["warnings"]) == 1
        assert "_context_parallel_shard" in found["warnings"][0]


@pytest.fixture
def handlers_of_torch_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state in which torch 2.9 runs the body of ``context_parallel``, whichever its mode of dispatch."""
    from torch.distributed.tensor import DTensor, experimental

    def handler(*args: Any) -> None: ...

    handler.__module__ = f"{experimental.__name__}._attention"
    dispatcher = DTensor._op_dispatcher
    key = torch.ops.aten._scaled_dot_product_flash_attention.default
    monkeypatch.setattr(dispatcher, "_custom_op_handlers", {**dispatcher._custom_op_handlers, key: handler})


def test_the_handlers_of_torch_2_9_are_recognised(request: pytest.FixtureRequest) -> None:
    q = torch.randn(1, 2, 5, 8)
    headscope.attention(q, q, q)
    request.getfixturevalue("handlers_of_torch_2_9")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="context parallelism is active"):
            headscope.attention(q, q, q)


def test_another_handler_of_attention_is_not_taken_for_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import DTensor, experimental

    assert experimental is not None
    dispatcher = DTensor._op_dispatcher
    key = torch.ops.aten._scaled_dot_product_flash_attention.default
    monkeypatch.setattr(dispatcher, "_custom_op_handlers", {**dispatcher._custom_op_handlers, key: print})
    q = torch.randn(1, 2, 5, 8)
    assert headscope.attention(q, q, q).shape == q.shape


def test_a_compiled_call_raises_as_well(request: pytest.FixtureRequest) -> None:
    if native.extension is None:
        pytest.skip("the native extension is not built")
    q = torch.randn(1, 2, 5, 8)
    compiled = torch.compile(lambda q: headscope.attention(q, q, q), backend="eager")
    compiled(q)
    request.getfixturevalue("handlers_of_torch_2_9")
    with pytest.raises(RuntimeError, match="context parallelism is active"):
        compiled(q)


def test_without_torch_distributed_tensor_nothing_is_imported() -> None:
    program = "import sys, torch, headscope; q = torch.ones(1, 1, 2, 8); headscope.attention(q, q, q); "
    program += f"print({context_parallel.CONTEXT_PARALLEL!r} in sys.modules)"
    done = run_program(program)
    assert done.stdout.strip() == "False", done.stderr


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``F.scaled_dot_product_attention`` replaced by a function that calls headscope, as users do; and its calls."""
    calls: list[str] = []

    def replacement(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append("called")
        return headscope.attention(q, k, v, backend="sdpa")

    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    return calls


def test_sdpa_calls_the_function_that_stands_in_torch_now(replaced: list[str]) -> None:
    q = torch.randn(1, 2, 17, 8)
    expected = headscope.attention(q, q, q, backend="reference")
    for _ in range(2):
        replaced.clear()
        torch.testing.assert_close(headscope.attention(q, q, q, backend="sdpa"), expected)
        assert replaced == ["called"], "one call of the replacement, which does not call itself again"
