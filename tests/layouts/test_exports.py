"""layouts: every option of MultiHeadAttention in every layout either survives an export or is an error."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention, layouts
from headscope.positions import NTK, ALiBi, LinearScaling, Rotary, T5Buckets, YaRN
from support.cases import case

B, H, T, E, D = 2, 2, 5, 16, 8  # batch, heads, length, width, width of a head
ROTARY = ("llama", "mistral", "qwen2", "qwen3")
BUCKETS = T5Buckets(8, 9)

FITTING: dict[str, dict[str, Any]] = {
    "tokeys": {"bias": False, "out_bias": True, "scale": E**-0.5},
    "whisper": {"bias": ("q", "v"), "out_bias": True},
    "t5": {"bias": False, "scale": 1.0},
    "mistral": {"bias": False},
    "qwen2": {"out_bias": False},
    "qwen3": {"qk_norm": "rms"},
}
"""The options of a module that fits a layout, where the default options do not; and rotary where it has one."""

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "kv_heads": {"kv_heads": 1},
    "head_dim": {"head_dim": 6},
    "v_head_dim": {"v_head_dim": 6},
    "kdim": {"kdim": 7, "vdim": E},
    "vdim": {"vdim": 7},
    "kdim and vdim": {"kdim": 7, "vdim": 9},
    "bias": {"bias": True},
    "bias of q": {"bias": ("q",)},
    "no bias": {"bias": False},
    "out_bias": {"out_bias": True},
    "no out_bias": {"out_bias": False},
    "scale": {"scale": 0.37},
    "scale below 0": {"scale": -(D**-0.5)},
    "scale 0": {"scale": 0.0},
    "scale 1": {"scale": 1.0},
    "scale of tutorials": {"scale": E**-0.5},
    "scale by layer": {"scale": D**-0.5 / 3},
    "scale 1 by layer": {"scale": 1 / 12},
    "scale of no layer": {"scale": 1 / 12.5},
    "scale of a layer too far": {"scale": 1e-7},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.3},
    "dtype": {"dtype": torch.float32},
    "rotary": {"rotary": Rotary(D)},
    "rotary, base": {"rotary": Rotary(D, 500.0)},
    "rotary, linear": {"rotary": Rotary(D, scaling=LinearScaling(2.0))},
    "rotary, NTK": {"rotary": Rotary(D, scaling=NTK(2.0))},
    "rotary, YaRN": {"rotary": Rotary(D, scaling=YaRN(2.0, 3))},
    "rotary, interleaved": {"rotary": Rotary(D, pairing="interleaved")},
    "rotary, partial": {"rotary": Rotary(4)},
    "rotary, none": {"rotary": None},
    "position_bias of ALiBi": {"position_bias": ALiBi(H)},
    "position_bias of T5": {"position_bias": BUCKETS},
    "qk_norm rms": {"qk_norm": "rms", "qk_norm_eps": 0.5},
    "qk_norm layer": {"qk_norm": "layer", "qk_norm_eps": 0.5},
    "qk_norm rms_all": {"qk_norm": "rms_all"},
    "no qk_norm": {"qk_norm": None},
    "gate": {"gate": True},
    "bias_kv": {"bias_kv": True},
    "reproducible": {"reproducible": True},
}


def made(layout: str, options: dict[str, Any], kind: type[MultiHeadAttention] = MultiHeadAttention) -> Any:
    """A module that fits a layout but for these options, with every parameter random, in eval mode."""
    turned = layout in ROTARY and not {"kdim", "vdim"} & set(options)  # the module itself refuses both together
    rotary = {"rotary": Rotary(options.get("head_dim", D), 1000.0)} if turned else {}
    module = kind(E, H, **{"dtype": torch.float64, **rotary, **FITTING.get(layout, {}), **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.eval()


def settings(layout: str, module: MultiHeadAttention) -> dict[str, Any]:
    """What the configuration of the other side can set to match a module, as options of ours."""
    found: dict[str, Any] = {} if layout == "keras" else {"num_heads": H}
    if layout in ROTARY:
        assert module.rotary is not None
        found["rotary"] = Rotary(module.head_dim, module.rotary.base, scaling=module.rotary.scaling)
    if layout.startswith("gpt2"):
        scales = [scale / layer for scale in (D**-0.5, 1.0) for layer in range(1, 49)]  # XL has 48 layers
        found["scale"] = min(scales, key=lambda scale: abs(scale - module.scale))
    if layout == "t5" and module.position_bias is not None:
        found["position_bias"] = BUCKETS
    if module.qk_norm is not None:
        found |= {"qk_norm": module.qk_norm} if layout == "timm" else {}
        found["qk_norm_eps"] = getattr(module.q_norm, "eps")  # noqa: B009
    return found


def output(module: MultiHeadAttention, layout: str) -> Tensor:
    torch.manual_seed(0)
    dtype = module.out_proj.weight.dtype
    x, k, v = (torch.randn(B, T, width, dtype=dtype) for width in (E, module.kdim, module.vdim))
    return module(x) if module.kdim == module.vdim == E else module(x, (k, v))


@pytest.mark.parametrize("layout", layouts.known())
def test_an_option_survives_the_round_trip_or_the_error_names_it(layout: str) -> None:
    for name, options in OPTIONS.items():
        with case(name):
            check_round_trip(layout, options)


def check_round_trip(layout: str, options: dict[str, Any]) -> None:
    module = made(layout, options)
    try:
        state = module.to_state_dict(layout)
    except ValueError as error:
        message = str(error)
    else:
        back = MultiHeadAttention.from_state_dict(state, layout, **settings(layout, module)).eval()
        torch.testing.assert_close(output(back, layout), output(module, layout))
        return
    assert options, message
    assert message.startswith("module: ")
    assert any(option in message for option in options), message


def test_every_option_of_the_module_is_here() -> None:
    sizes_and_device = {"embed_dim", "num_heads", "device"}
    tested = {option for options in OPTIONS.values() for option in options}
    assert set(inspect.signature(MultiHeadAttention).parameters) - sizes_and_device == tested


def test_layouts_that_pack_projections_fix_their_sizes() -> None:
    """Else a packed tensor could not be cut again."""
    for layout in layouts.LAYOUTS.values():
        packed = [name for part in layout.parts if len(part.holds) > 1 for name in part.holds]
        if packed:
            assert not layout.grouped
            assert not {"head_dim", "v_head_dim"} & set(layout.widths)
        if any(name.endswith(".weight") for name in packed):
            assert not layout.widths


@pytest.mark.parametrize("layout", ["gpt2", "gpt2_cross"])
@pytest.mark.parametrize("scale", [D**-0.5, 1.0, D**-0.5 / 12, 1 / 12])
def test_gpt2_has_four_scales_in_its_twelfth_layer(layout: str, scale: float) -> None:
    module = made(layout, {"scale": scale})
    back = MultiHeadAttention.from_state_dict(module.to_state_dict(layout), layout, num_heads=H, scale=scale)
    torch.testing.assert_close(output(back, layout), output(module, layout))


def test_the_error_of_a_scale_lists_those_of_gpt2() -> None:
    error = r"module: scale is 0\.37; a module of layout 'gpt2' has 0\.353553 or 1, or one of these divided by the nu"
    with pytest.raises(ValueError, match=error):
        made("gpt2", {"scale": 0.37}).to_state_dict("gpt2")


@pytest.mark.parametrize("layout", ROTARY)
@pytest.mark.parametrize("rotary", [Rotary(D, pairing="interleaved"), Rotary(4), None], ids=str)
def test_rotary_that_a_layout_does_not_have_is_no_option_of_an_import(layout: str, rotary: Rotary | None) -> None:
    state = made(layout, {}).to_state_dict(layout)
    error = rf"^rotary: .*layout '{layout}', .*; expected dim {D} and pairing 'half', got "
    with pytest.raises(ValueError, match=error):
        MultiHeadAttention.from_state_dict(state, layout, num_heads=H, rotary=rotary)


# ---------------------------------------------------------------- what runs beside the weights


class Doubled(MultiHeadAttention):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(2 * x, *args, **kwargs)


class Inherits(Doubled):
    pass


class Projects(MultiHeadAttention):
    def project(self, *args: Any, **kwargs: Any) -> Any:
        return super().project(*args, **kwargs)


class Plain(MultiHeadAttention):
    pass


class Shifted(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def set_on(path: str, name: str = "forward") -> Any:
    def change(module: nn.Module) -> None:
        part = module.get_submodule(path)
        setattr(part, name, lambda *args: args[0])

    return change


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Doubled, None, "Doubled is a MultiHeadAttention with a forward of its own"),
        (Inherits, None, "Inherits is a MultiHeadAttention with a forward of its own"),
        (Projects, None, "Projects is a MultiHeadAttention with a project of its own"),
        (Plain, set_on(""), "Plain has a forward set on the instance"),
        (Plain, set_on("", "project"), "Plain has a project set on the instance"),
        (Plain, set_on("out_proj"), "out_proj has a forward set on the instance"),
        (Plain, lambda m: m.q_proj.register_forward_hook(lambda *_: None), "q_proj has hooks"),
        (Plain, lambda m: m.out_proj.register_forward_pre_hook(lambda *_: None), "out_proj has hooks"),
        (Plain, lambda m: m.k_norm.register_forward_hook(lambda *_: None), "k_norm has hooks"),
        (
            Plain,
            lambda m: setattr(m, "q_norm", Shifted(D)),
            "q_norm is a Shifted, whose forward differs from that of a RMS",
        ),
    ],
)
def test_what_runs_beside_the_weights_is_not_exported(kind: Any, change: Any, message: str) -> None:
    module = made("qwen3", {"bias": ("q",)}, kind)
    if change is not None:
        change(module)
    with pytest.raises(
        ValueError, match=rf"^module: {message}.*, so its output may depend on more than its weights; expected Multi"
    ):
        module.to_state_dict("qwen3")


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_subclass_that_inherits_its_forward_and_hooks_of_the_module_itself_are_exported(norm: str) -> None:
    module = made("timm", {"qk_norm": norm}, Plain)
    module.register_forward_hook(lambda *_: None)
    back = MultiHeadAttention.from_state_dict(module.to_state_dict("timm"), "timm", num_heads=H, qk_norm=norm)
    torch.testing.assert_close(output(back, "timm"), output(module, "timm"))
