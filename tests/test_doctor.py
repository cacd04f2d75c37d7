"""doctor's verdicts are those of a real call."""

from __future__ import annotations

import pytest
import torch

from headscope import attention, masks
from headscope._backends import cpu
from headscope._doctor import TYPICAL, Ask, judge, machine
from headscope._select import BACKENDS

SMALL = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window of 128": {"mask": masks.window(3)},
    "softcap": {"softcap": 50.0},
    "dropout": {"dropout": 0.1},
}


@pytest.mark.parametrize("title", TYPICAL)
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_every_typical_call_has_a_backend_and_reasons(title: str, device: str) -> None:
    verdict = judge(TYPICAL[title], torch.float32, device)
    assert verdict.selected in BACKENDS
    assert verdict.selected not in verdict.refusals
    assert all(reasons and all(reasons) for reasons in verdict.refusals.values())


@pytest.mark.parametrize("title", SMALL)
def test_what_is_refused_here_is_refused_by_attention(title: str) -> None:
    q, k, v = torch.randn(3, 2, 8, 5, 64).unbind()
    verdict = judge(TYPICAL[title], torch.float32, "cpu")
    for name in BACKENDS:
        if name in verdict.refusals:
            with pytest.raises(ValueError, match=f"backend: {name} refuses this call"):
                attention(q, k, v, backend=name, **SMALL[title])
        else:
            assert attention(q, k, v, backend=name, **SMALL[title]).shape == (2, 8, 5, 64)


def test_sizes_of_any_kind_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "native", None)  # it would take the call
    ask = Ask(batch=3, heads=6, kv_heads=2, queries=5, keys=7, head_dim=11, v_head_dim=13, causal=True, padded=True,
              bias=True, softcap=2.0, sinks=True, dropout=0.5, lse=True, grad=True)  # fmt: skip
    verdict = judge(ask, torch.bfloat16, "cpu")
    assert verdict.selected == "blocked"
    assert {reason.split(":")[0] for reason in verdict.refusals["sdpa"]} >= {"lse", "softcap", "sinks", "dropout", "Dv"}


def test_the_machine_is_described() -> None:
    found = machine()
    assert found.keys() == {"versions", "machine", "torch", "native kernels"}
    assert found["versions"]["torch"] == torch.__version__
    assert found["torch"]["threads"] == torch.get_num_threads()
    assert found["machine"]["cores"] >= 1
