"""benchmarks/selection_recall.py: its policies keep to their budget, none exceeds top-k; the guide has its table."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headscope import Observe, masks, observe
from support.paths import BENCHMARKS, ROOT

sys.path.insert(0, str(BENCHMARKS))

import selection_recall  # pyright: ignore[reportMissingImports]

sys.path.remove(str(BENCHMARKS))

LENGTH = selection_recall.LENGTH


@pytest.fixture(scope="module")
def tensors() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 3, LENGTH, 5, generator=random)
    return 2 * q, 2 * k


def table_of(selected: Tensor | masks.Mask) -> Tensor:
    """Which keys are selected, boolean [2, 3, T, T]."""
    sizes = (2, 3, LENGTH, LENGTH)
    if isinstance(selected, masks.Mask):
        return selected.dense(*sizes)
    if selected.dtype == torch.bool:
        return selected.expand(sizes)
    return torch.zeros(sizes, dtype=torch.bool).scatter(-1, selected, True)


@pytest.mark.parametrize("n", [LENGTH // share for share in selection_recall.SHARES])
@pytest.mark.parametrize("policy", selection_recall.POLICIES.values(), ids=lambda policy: policy.__name__)
def test_a_policy_keeps_to_its_budget(
    policy: Callable[[Tensor, Tensor, int], Tensor | masks.Mask], n: int, tensors: tuple[Tensor, Tensor]
) -> None:
    q, k = tensors
    causal = masks.causal().dense(2, 3, LENGTH, LENGTH)
    counts = (table_of(policy(q, k, n)) & causal).sum(-1)
    assert int(counts.max()) <= n
    assert int(counts[..., selection_recall.FIRST_ROW :].min()) >= 1
    limit, recall = (
        observe(q, k, mask=masks.causal(), what=Observe(selected=each(q, k, n), keep_rows=True)).kept[0].values
        for each in (selection_recall.pick_largest, policy)
    )
    assert bool((recall["recall"] <= limit["recall"] + 1e-6).all())


def test_evicted_keys_do_not_return(tensors: tuple[Tensor, Tensor]) -> None:
    for policy in (selection_recall.pick_h2o, selection_recall.pick_tova):
        cached = policy(*tensors, 16)
        entered = cached[:, :, 1:] & ~cached[:, :, :-1]
        own = torch.eye(LENGTH, dtype=torch.bool)[1:]
        assert torch.equal(entered, own.expand_as(entered))


def test_the_bound_of_a_page_is_not_below_its_logits(tensors: tuple[Tensor, Tensor]) -> None:
    """With one page for all keys but one, Quest selects the page of the largest logit or its own."""
    q, k = tensors
    k = k.repeat_interleave(selection_recall.PAGE, 2)[:, :, :LENGTH]  # equal keys in a page: bounds are logits
    pages = selection_recall.pick_quest(q, k, 2 * selection_recall.PAGE)
    full = torch.arange(LENGTH) // selection_recall.PAGE < (torch.arange(LENGTH) // selection_recall.PAGE)[:, None]
    largest = (q @ k.mT).masked_fill(~full, -torch.inf).argmax(-1, keepdim=True)
    assert bool(pages.gather(-1, largest)[:, :, selection_recall.PAGE :].all())


def rows_of(text: str) -> list[str]:
    starts = tuple(f"| {name} | " for name in selection_recall.POLICIES)
    return [line for line in text.splitlines() if line.startswith(starts)]


def test_the_guide_has_the_table_of_the_script() -> None:
    written = rows_of((BENCHMARKS / "selection_recall.md").read_text(encoding="utf-8"))
    guide = (ROOT / "docs" / "guides" / "selection_recall.md").read_text(encoding="utf-8")
    shown = [line for line in rows_of(guide) if line.count("|") == 11]
    assert shown == written
    assert len(written) == len(selection_recall.POLICIES)


def test_a_row_of_the_table_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import headscope

    example = headscope.load_example("text")
    ids = selection_recall.load_tokens(example.tokenizer)
    name = "window + sinks (StreamingLLM)"
    monkeypatch.setattr(selection_recall, "POLICIES", {name: selection_recall.POLICIES[name]})
    row = selection_recall.render_table(example.model, ids).splitlines()[-1]
    assert row in (BENCHMARKS / "selection_recall.md").read_text(encoding="utf-8").splitlines()
    assert capsys.readouterr().out == row + "\n"
