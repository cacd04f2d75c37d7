"""watch: attention written by hand in ways that are easily recorded wrongly is recorded right, or not at all."""

from __future__ import annotations

import pytest
import torch

from headscope import watch
from headscope.watching import WatchError, WatchWarning
from support.written_attacks import ATTACKS, attack_module
from support.watched_small import Attention

RIGHT = [name for name, attack in ATTACKS.items() if attack.expected == "right"]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, passes: int) -> None:
    model, x = attack_module(name)
    torch.manual_seed(0)
    plain = model(x)
    model.weights.clear()
    torch.manual_seed(0)
    with watch(model) as seen:
        out = model(x)
        for n in range(1, passes):
            model(x + n)
    assert torch.equal(out, plain)
    assert seen.layers == ("Attends",)
    p = torch.cat(model.weights)
    assert p.shape[0] == 2 * passes
    for quantity, values in (("entropy", torch.special.entr(p).sum(-1)), ("max_weight", p.amax(-1))):
        torch.testing.assert_close(seen[quantity].mean[0], values.mean((0, 2)), rtol=1e-5, atol=1e-6)
    assert seen["entropy"].count[0].tolist() == [p.shape[0] * p.shape[2]] * p.shape[1]


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in RIGHT])
def test_refused(name: str) -> None:
    model, x = attack_module(name)
    torch.manual_seed(0)
    plain = model(x)
    torch.manual_seed(0)
    with pytest.raises(WatchError, match="no attention call was observed"), watch(model):
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in RIGHT])
def test_what_is_refused_beside_a_recorded_layer_is_warned_of(name: str) -> None:
    refused, x = attack_module(name)
    attention = Attention(x.shape[-1])
    model = torch.nn.Sequential(attention, refused)
    with pytest.warns(WatchWarning, match=r"1 \(Attends\) may also attend"), watch(model) as seen:
        model(x)
    assert seen.layers == ("0",)
