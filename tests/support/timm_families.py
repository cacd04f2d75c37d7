"""Families of timm, small and with random weights, and what ``watch`` records of them against a float64 truth.

timm returns no weights. So a spy computes the truth: the entropies of what goes into each softmax, in float64, and of
each fused call from its q, k and mask.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from support.families import Family, Spy, UnbuiltError, are_same

TOLERANCE = 1e-5
_TINY: dict[str, Any] = {"depth": 2, "embed_dim": 24, "num_heads": 3}
_VIT: dict[str, Any] = {**_TINY, "img_size": 48}
_TWO: dict[str, Any] = {"depths": (1, 2, 1, 1)}
_STAGES: dict[str, Any] = {**_TWO, "img_size": 96}
NAMES: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _VIT, "vit_base_patch14_dinov2": {**_VIT, "img_size": 42},
    "vit_small_patch16_18x2_224": _VIT, "vit_base_patch16_siglip_224": _VIT, "vit_base_patch16_rpn_224": _VIT,
    "vit_base_patch16_xp_224": _VIT, "vit_base_patch16_radio_v3": _VIT, "vit_so150m_patch16_reg4_map_256": _VIT,
    "vit_dpwee_patch16_reg1_gap_256": _VIT, "vit_dwee_patch16_reg1_gap_256": _VIT,
    "vit_base_patch14_reg1_tipsv2": {**_VIT, "img_size": 42}, "vit_intern300m_patch14_448": {**_VIT, "img_size": 42},
    "aimv2_large_patch14_224": {**_VIT, "img_size": 42}, "beit3_base_patch16_224": _VIT, "flexivit_small": _VIT,
    "test_vit": {}, "test_vit2": {}, "test_vit3": {}, "test_vit4": {}, "deit_tiny_patch16_224": _VIT,
    "deit_tiny_distilled_patch16_224": _VIT, "deit3_small_patch16_224": _VIT, "beit_base_patch16_224": _VIT,
    "beitv2_base_patch16_224": _VIT, "eva02_tiny_patch14_224": {**_VIT, "img_size": 42},
    "eva_giant_patch14_224": {**_VIT, "img_size": 42}, "vit_small_patch16_dinov3": _VIT,
    "vit_small_patch16_dinov3_qkvb": _VIT, "vit_small_patch16_rope_224": _VIT, "vit_small_patch16_rope_mixed_224": _VIT,
    "vit_medium_patch16_rope_reg1_gap_256": _VIT, "vit_pe_core_tiny_patch16_384": _VIT,
    "vit_base_patch16_sapiens2": _VIT, "vit_small_patch16_lingbot": _VIT, "deepseek_vit_412m": _VIT,
    "gemma4_vit_167m": _VIT, "qwen3_vit_88m_enc": _VIT, "qwen3_vit_88m_merge": _VIT,
    "naflexvit_base_patch16_gap": _TINY, "naflexvit_base_patch16_map": _TINY, "naflexvit_base_patch16_siglip": _TINY,
    "vit_relpos_small_patch16_224": _VIT, "vit_srelpos_small_patch16_224": _VIT,
    "vit_relpos_small_patch16_rpn_224": _VIT, "test_vit_relpos": {},
    "samvit_base_patch16_224": {**_VIT, "img_size": 64, "window_size": 3},
    "vit_tiny_r_s16_p8_224": {**_TINY, "img_size": 64}, "vit_base_mci_224": {**_TINY, "img_size": 64},
    "vitamin_small_224": {"img_size": 64}, "cait_xxs24_224": {**_VIT, "depth_token_only": 2},
    "convit_tiny": {"img_size": 48, "depth": 3, "local_up_to_layer": 2}, "coat_tiny": {"img_size": 64},
    "coat_lite_tiny": {"img_size": 64}, "crossvit_tiny_240": {}, "crossvit_9_dagger_240": {}, "csatv2": {},
    "davit_tiny": _TWO, "edgenext_xx_small": {}, "efficientformer_l1": {}, "efficientformerv2_s0": {},
    "efficientvim_m1": {}, "efficientvit_b0": {}, "efficientvit_l1": {}, "efficientvit_m0": {}, "fastvit_sa12": {},
    "fastvit_mci0": {}, "gcvit_xxtiny": {}, "hiera_tiny_224": {}, "sam2_hiera_tiny": {}, "hieradet_small": {},
    "iformer_t": {}, "levit_128s": {}, "levit_conv_128s": {}, "levit_128": {}, "lowformer_b0": {}, "cpubone_nano": {},
    "test_maxvit": {}, "test_coatnet": {}, "maxvit_pico_rw_256": {}, "maxvit_tiny_pm_256": _TWO,
    "maxxvit_rmlp_nano_rw_256": {}, "maxxvitv2_nano_rw_256": {}, "coatnet_pico_rw_224": {},
    "coatnet_rmlp_nano_rw_224": {}, "coatnext_nano_rw_224": {}, "caformer_s18": _TWO, "poolformer_s12": _TWO,
    "mobilenetv5_base": {}, "mobilenetv4_hybrid_medium": {}, "mobilevit_xxs": {}, "mobilevitv2_050": {},
    "mvitv2_tiny": _TWO, "mvitv2_small_cls": _TWO, "nest_tiny": {"img_size": 56, "depths": (1, 1, 2)},
    "nest_tiny_jx": {"img_size": 56, "depths": (1, 1, 2)}, "nextvit_small": {}, "pit_ti_224": {},
    "pit_ti_distilled_224": {}, "pvt_v2_b0": {}, "pvt_v2_b2_li": _TWO, "shvit_s1": {"side": 224}, "swiftformer_xs": {},
    "swin_tiny_patch4_window7_224": {**_STAGES, "img_size": 224}, "swin_s3_tiny_224": _TWO,
    "swinv2_tiny_window8_256": {**_TWO, "img_size": 128}, "swinv2_cr_tiny_ns_224": {**_TWO, "img_size": 112},
    "tiny_vit_5m_224": {}, "tnt_s_patch16_224": {"depth": 2, "img_size": 64}, "tnt_s_legacy_patch16_224": {"depth": 2},
    "twins_pcpvt_small": _STAGES, "twins_svt_small": _STAGES, "visformer_tiny": {"img_size": 64},
    "volo_d1_224": {"layers": (1, 1, 2, 1), "img_size": 64}, "xcit_nano_12_p8_224": {"depth": 2, "img_size": 48},
    "xcit_nano_12_p16_224": {"depth": 2, "img_size": 48}, "botnet26t_256": {"img_size": 128}, "halonet26t": {},
    "lambda_resnet26t": {}, "sebotnet33ts_256": {}, "resnet50_clip": {},
    "vit_pe_lang_large_patch14_448": {**_VIT, "img_size": 42}, "skresnet18": {}, "gcresnext26ts": {},
    "bat_resnext26ts": {}, "resnest14d": {}, "focalnet_tiny_srf": _TWO, "mixer_s16_224": {}, "sequencer2d_s": {},
    "mambaout_femto": {}, "convnext_atto": {}, "inception_next_atto": {}, "resmlp_12_224": {}, "gmlp_ti16_224": {},
}  # fmt: skip
"""A model of each family: its arguments, which make it small. Of some modules of timm, there are several families."""
SIDES = (96, 128, 160, 192, 224, 240, 256)
"""Sides of images, the smallest first; the first one that runs is taken where the arguments have none."""


def build(name: str, *, fused: bool) -> Family:
    """Return a family, with fused attention if it has that.

    Raises:
        UnbuiltError: no size of an image was taken; the message is that of the last.
    """
    timm: Any = import_module("timm")  # optional: the tests do not require it
    timm.layers.set_fused_attn(fused)
    options, reasons = dict(NAMES[name]), list[str]()
    least = options.pop("side", 0)
    for arguments in (options, {key: n for key, n in options.items() if key != "img_size"}, {}):
        try:
            torch.manual_seed(0)
            model = timm.create_model(name, pretrained=False, **arguments)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        _spread(model)
        sides = (arguments["img_size"],) if "img_size" in arguments else [side for side in SIDES if side >= least]
        for side in sides:
            images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
            try:
                _normalise(model, images)
                with torch.no_grad():
                    model(images)
                return Family(name, model, {"x": images})
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
    raise UnbuiltError(" | ".join(reason.strip().splitlines()[0][:120] for reason in reasons)[:600])


def _spread(model: nn.Module) -> None:
    """Give a model weights for which attention is not flat: projections that retain the variance of their input."""
    random = torch.Generator().manual_seed(3)
    owners = {id(own): kind for kind in model.modules() for own in kind.parameters(recurse=False)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if isinstance(owners[id(parameter)], (nn.Linear, nn.modules.conv._ConvNd)) and parameter.ndim > 1:
                parameter.copy_(noise * (1.3 / math.sqrt(max(1, parameter[0].numel()))))
            elif parameter.ndim > 1:
                parameter.add_(noise * 0.3)
            elif parameter.ndim and isinstance(owners[id(parameter)], (nn.Linear, nn.modules.conv._ConvNd)):
                parameter.copy_(noise * 0.1)
    model.eval()


def _normalise(model: nn.Module, images: Tensor) -> None:
    """Set the statistics of batch norms to those of the images, so that activations neither vanish nor explode."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        model(images)
    model.eval()


class TruthSpy(Spy):
    """A spy that also computes the entropy of each row of each softmax and fused call, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.entropies: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_softmax", "_safe_softmax"):
            self.entropies.append(_entropies(args[0].double().softmax(args[1]), args[1]))
        elif "scaled_dot_product" in name and "backward" not in name:
            self.entropies.append(_entropies(_fused_weights(func, args, kwargs or {}), -1))
        elif name in ("bmm", "mm"):  # weights that were changed after their softmax
            for x, axis in zip(args[-2:], (-1, -2), strict=True):
                if x.untyped_storage()._cdata in self.softmaxes and x.shape[-1] > 1:
                    p = x.double()
                    if torch.allclose(p.sum(axis), torch.ones(()).to(p), atol=1e-4) and bool((p >= 0).all()):
                        self.entropies.append(_entropies(p, axis))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and name in ("mul", "add", "div", "sub") and self._has_weights(out, args):
            self.softmaxes[out.untyped_storage()._cdata] = out  # a mixture of two softmaxes, or one that is scaled
        return out

    def _has_weights(self, out: Tensor, args: tuple[Any, ...]) -> bool:
        tensors = [x for x in args if isinstance(x, Tensor) and x.shape == out.shape]
        return any(x.untyped_storage()._cdata in self.softmaxes for x in tensors)


def _entropies(p: Tensor, axis: int) -> Tensor:
    return torch.special.entr(p).sum(axis)


def _fused_weights(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the weights of a fused call, [B, H, Q, K], in float64."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k = given["query"].double(), given["key"].double()
    if k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scale = given.get("scale")
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = given.get("attn_mask", given.get("attn_bias"))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if given.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1)


def _by_head(entropies: Tensor, heads: int) -> Iterator[Tensor]:
    """Yield the means of rows, of each axis that may be that of the heads: it, or a part of it that is folded."""
    for at, size in enumerate(entropies.shape):
        if heads and size % heads == 0:
            x = entropies.movedim(at, 0).reshape(size, -1)
            for inner in {1, *(n for n in range(1, size // heads + 1) if size // heads % n == 0)}:
                yield x.view(size // heads // inner, heads, inner, -1).mean((0, 2, 3))
    if heads == 1:
        yield entropies.mean().view(1)


def compare(seen: Any, spy: TruthSpy) -> dict[str, Any]:
    """Return the largest error of the layers' entropies against those of the spy, and which layers differ from all."""
    error, unmatched, used = 0.0, list[str](), set[int]()
    for layer in seen.layers:
        mean = seen[layer, "entropy"].mean.double()
        best = (math.inf, -1)
        for number, entropies in enumerate(spy.entropies):
            for truth in _by_head(entropies, len(mean)):
                apart = float(((mean - truth).abs() / truth.abs().clamp_min(1e-3)).max())
                best = min(best, (apart, number))
        if best[0] <= TOLERANCE:
            error = max(error, best[0])
            used.add(best[1])
        else:
            unmatched.append(f"{layer}: {best[0]:.2g}")
    return {"error": error, "unmatched": unmatched, "matched": len(used)}


def survey(name: str) -> dict[str, Any]:
    """Return what is known of a family, as plain values: with fused attention and without."""
    result: dict[str, Any] = {"name": name}
    for fused in (True, False):
        try:
            family = build(name, fused=fused)
        except UnbuiltError as error:
            return {"name": name, "unbuilt": str(error)}
        result |= {"module": type(family.model).__module__.rpartition(".")[2]}
        result["on" if fused else "off"] = _survey_one(family)
    return result


def _survey_one(family: Family) -> dict[str, Any]:
    import headscope
    from headscope.watching import WatchError

    model, inputs = family.model, family.inputs
    spy = TruthSpy()
    with torch.no_grad():
        plain = model(**inputs)
        with spy:
            model(**inputs)
    result: dict[str, Any] = {"fused": spy.fused, "written": spy.written, "finite": bool(plain.isfinite().all())}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.no_grad(), headscope.watch(model) as seen:
                watched = model(**inputs)
        except WatchError as error:
            return {**result, "refused": str(error), **_survey_others(family, plain, spy)}
        except Exception as error:
            return {**result, "crashed": f"{type(error).__name__}: {str(error)[:300]}"}
    result["warnings"] = [str(each.message) for each in caught if "headscope" in each.category.__module__]
    result["layers"] = len(seen.layers)
    result["same"] = are_same(plain, watched)
    return {**result, **compare(seen, spy)}


def _survey_others(family: Family, plain: Any, spy: TruthSpy) -> dict[str, Any]:
    """Return what is known of the layers of a family that are recorded where others are refused."""
    import headscope
    from headscope.watching import WatchError

    try:
        with torch.no_grad(), headscope.watch(family.model, unseen="ignore") as seen:
            watched = family.model(**family.inputs)
    except WatchError:
        return {"layers": 0}
    return {"layers": len(seen.layers), "same": are_same(plain, watched), **compare(seen, spy)}
