"""Export to ONNX, run by ONNX Runtime: the same numbers, at lengths that were left open."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import headscope
import headscope.onnx
from headscope import MultiHeadAttention, masks
from headscope._support import onnx_export
from headscope.positions import NTK, LinearScaling, Llama3, Rotary, YaRN

pytestmark = [
    pytest.mark.usefixtures("operators_read_once"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # of onnxscript's, at import
    pytest.mark.filterwarnings("ignore:# The axis name. .* will not be used:UserWarning"),  # a name for several axes
]

NAMES = ("q", "k", "v", "lengths", "bias", "sinks")
B, H, HKV, D, DV = 2, 6, 3, 8, 5
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
SIZES = ((7, 11), (11, 11), (9, 5), (1, 4))
"""Queries and keys; exported with the first. With more queries than keys the first rows of a causal mask are empty."""


Options = Callable[[Tensor, Tensor, Tensor], dict[str, Any]]
"""Of lengths, bias and sinks, what ``attend`` is called with."""


def given(queries: int, keys: int) -> tuple[Tensor, ...]:
    q, k = torch.randn(B, H, queries, D), torch.randn(B, HKV, keys, D)
    lengths = torch.tensor([keys, 3])
    return q, k, torch.randn(B, HKV, keys, DV), lengths, torch.randn(H, 1, 1), torch.randn(H)


class Attend(nn.Module):
    """Attention with some options; its lse as well if it is asked for."""

    def __init__(self, options: Options, lse: bool = False) -> None:
        super().__init__()
        self.options = options
        self.lse = lse

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        out, lse, _ = headscope.attend(q, k, v, backend="cpu", **self.options(lengths, bias, sinks))
        return (out, lse) if self.lse else (out,)


class Several(nn.Module):
    """Calls of the same inputs in one graph: to export one takes a second, whatever is in it."""

    def __init__(self, calls: list[Attend]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(calls)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        return tuple(x for call in self.calls for x in call(q, k, v, lengths, bias, sinks))


def exported(
    model: nn.Module, inputs: tuple[Tensor, ...], sizes: Any, path: Path, calls: int = 1
) -> onnxruntime.InferenceSession:
    """The model in ONNX Runtime; nothing of headscope is in the file, and so many Attention."""
    torch.onnx.export(
        model.eval(), inputs, path, dynamo=True, opset_version=23, dynamic_shapes=sizes, verbose=False,
        custom_translation_table=headscope.onnx.translations(),
    )  # fmt: skip
    nodes = onnx.load(path).graph.node
    assert {node.domain for node in nodes} == {""}
    assert [node.op_type for node in nodes].count("Attention") == calls
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def ran(session: onnxruntime.InferenceSession, **inputs: Tensor) -> tuple[Tensor, ...]:
    """What it gives; inputs that its graph does not read are left out."""
    feeds = {each.name: inputs[each.name].numpy() for each in session.get_inputs()}
    return tuple(torch.from_numpy(x) for x in session.run(None, feeds))


OPTIONS: dict[str, tuple[Options, bool]] = {
    "nothing": (lambda lengths, bias, sinks: {}, False),
    "causal, with lse": (lambda lengths, bias, sinks: {"mask": masks.causal()}, True),
    "masks": (
        lambda lengths, bias, sinks: {
            "mask": (masks.window(3) | masks.Prefix(1)) & masks.KeyLengths(lengths) & masks.Band(None, None)
        },
        False,
    ),
    "offsets, softcap": (
        lambda lengths, bias, sinks: {
            "mask": masks.Band(2, 1, offset=(0, 2)) | masks.Band(0, 0, offset=1) | masks.Band(0, 0, offset=lengths),
            "softcap": 2.0, "scale": 0.7,
        },
        False,
    ),
    "far offsets": (
        lambda lengths, bias, sinks: {
            "mask": (masks.Band(1 << 51, 2 - (1 << 50), offset=lengths + (1 << 50)) | masks.Prefix(1))
            & masks.Band(sys.maxsize - 2, None, offset=lengths - sys.maxsize),
        },
        False,
    ),
    "scale of zero, with lse": (lambda lengths, bias, sinks: {"scale": 0.0, "mask": masks.window(3)}, True),
    "scale below zero, with lse": (
        lambda lengths, bias, sinks: {"scale": -0.7, "mask": masks.causal(), "bias": bias, "softcap": 2.0},
        True,
    ),
    "scale below zero, causal": (lambda lengths, bias, sinks: {"scale": -0.7, "mask": masks.causal()}, False),
    "sinks": (lambda lengths, bias, sinks: {"sinks": sinks}, False),
    "all, with lse": (
        lambda lengths, bias, sinks: {
            "mask": masks.causal() & masks.KeyLengths(lengths), "bias": bias, "sinks": sinks, "softcap": 2.0,
        },
        True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def all_options(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    """Every option in one graph."""
    queries, keys = Dim("queries", min=1, max=999), Dim("keys", min=1, max=999)
    sizes = ({2: queries}, {2: keys}, {2: keys}, {}, {}, {})
    model, path = Several([Attend(*option) for option in OPTIONS.values()]), tmp_path_factory.mktemp("options")
    return exported(model, given(*SIZES[0]), sizes, path / "model.onnx", len(OPTIONS))


@pytest.mark.parametrize("option", OPTIONS)
def test_onnx_runtime_gives_the_same(option: str, all_options: onnxruntime.InferenceSession) -> None:
    model = Attend(*OPTIONS[option])
    before = sum(1 + lse for _, lse in [*OPTIONS.values()][: [*OPTIONS].index(option)])
    for size in SIZES:
        inputs = given(*size)
        expected = model(*inputs)
        got = ran(all_options, **dict(zip(NAMES, inputs, strict=True)))[before : before + len(expected)]
        torch.testing.assert_close(got, expected, **CLOSE, msg=lambda said, size=size: f"{size}: {said}")


class Documented(nn.Module):
    """A module whose mask has tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(24, 6, kv_heads=2)

    def forward(self, x: Tensor, ids: Tensor, seen: Tensor) -> Tensor:
        return self.attention(x, mask=masks.Documents(ids.int(), ids) & masks.Dense(seen))


def test_a_module_with_documents(tmp_path: Path) -> None:
    model, length = Documented(), Dim("length", min=2, max=999)
    session = exported(
        model, (torch.randn(2, 7, 24), torch.arange(7).expand(2, -1) // 3, torch.ones(7, dtype=torch.bool)),
        ({1: length}, {1: length}, {0: length}), tmp_path / "model.onnx",
    )  # fmt: skip
    x, ids, seen = torch.randn(2, 13, 24), torch.arange(13).expand(2, -1) // 5, torch.rand(13) < 0.7
    torch.testing.assert_close(ran(session, x=x, ids=ids, seen=seen), (model(x, ids, seen),), **CLOSE)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(24, 6, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, mask=masks.causal())


def test_a_causal_mask_over_equal_lengths_is_the_operators_own(tmp_path: Path) -> None:
    model = Causal()
    session = exported(model, (torch.randn(2, 7, 24),), ({1: Dim("length", min=2, max=999)},), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    [attention] = [node for node in graph.node if node.op_type == "Attention"]
    assert len(attention.input) == 3, "no mask is made"
    assert [each.i for each in attention.attribute if each.name == "is_causal"] == [1]
    x = torch.randn(3, 11, 24)
    torch.testing.assert_close(ran(session, x=x[:2]), (model(x[:2]),), **CLOSE)


class CausalSinks(nn.Module):
    """A module with a causal mask and sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(24, 6, sinks=True)
        nn.init.normal_(self.attention.get_parameter("sinks"))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, mask=masks.causal())


def test_a_causal_mask_with_sinks(tmp_path: Path) -> None:
    model = CausalSinks()
    session = exported(model, (torch.randn(2, 7, 24),), ({1: Dim("length", min=2, max=999)},), tmp_path / "model.onnx")
    x = torch.randn(2, 11, 24)
    torch.testing.assert_close(ran(session, x=x), (model(x),), **CLOSE)


@pytest.mark.parametrize(
    ("dtype", "bias"), [(torch.float16, torch.float32), (torch.float32, torch.float16), (torch.float64, torch.float32)]
)
def test_a_bias_of_another_dtype(dtype: torch.dtype, bias: torch.dtype, tmp_path: Path) -> None:
    model = Attend(lambda lengths, bias, sinks: {"mask": masks.window(3), "bias": bias, "sinks": sinks})
    q, k, v, lengths, added, sinks = given(7, 11)
    inputs = (*(x.to(dtype) for x in (q, k, v)), lengths, added.to(bias), sinks.to(dtype))
    session = exported(model, inputs, None, tmp_path / "model.onnx")
    got = ran(session, **dict(zip(NAMES, inputs, strict=True)))
    torch.testing.assert_close(
        got, model(*inputs), **({"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else CLOSE)
    )


def test_float64_is_computed_in_float64(tmp_path: Path) -> None:
    """Numbers of ONNX's operators are float32, and ONNX Runtime takes the root of the scale in float32."""
    options: list[Options] = [
        lambda lengths, bias, sinks: {},
        lambda lengths, bias, sinks: {"mask": masks.causal(), "scale": -1 / 3},
        lambda lengths, bias, sinks: {"mask": masks.causal(), "scale": 0.0},
        lambda lengths, bias, sinks: {"mask": masks.window(3), "bias": bias, "sinks": sinks, "scale": 0.7},
        lambda lengths, bias, sinks: {"softcap": 2.0, "scale": 0.7},
    ]
    model = Several([Attend(each) for each in options])
    q, k, v, lengths, bias, sinks = given(7, 7)
    inputs = (q.double(), k.double(), v.double(), lengths, bias.double(), sinks.double())
    session = exported(model, inputs, None, tmp_path / "model.onnx", len(options))
    got = ran(session, **dict(zip(NAMES, inputs, strict=True)))
    torch.testing.assert_close(got, model(*inputs), rtol=1e-13, atol=1e-14)


ROTARIES = [
    Rotary(D, base=10000.1, scaling=scaling)
    for scaling in (
        None, LinearScaling(3.3), NTK(4.0), NTK(4.3, original_length=16), YaRN(4.3, 16),
        YaRN(4.3, 16, mscale=0.7, mscale_all_dim=1.1), Llama3(8.3, 1.1, 4.3, 16),
    )
]  # fmt: skip


class Turned(nn.Module):
    """A tensor, turned by every rotary embedding to positions from 0 on."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(rotary.rotate(x, slice(0, x.shape[-2])) for rotary in ROTARIES)


def test_rotary_angles_are_computed_in_float64(tmp_path: Path) -> None:
    """The exporter writes the numbers of a graph as float32."""
    x = torch.randn(1, 2, 9, D, dtype=torch.float64)
    torch.onnx.export(
        Turned().eval(), (x,), tmp_path / "model.onnx", dynamo=True, opset_version=23, verbose=False,
        dynamic_shapes=({2: Dim("length", min=2)},),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for length in (9, 40):
        x = torch.randn(1, 2, length, D, dtype=torch.float64)
        turned = tuple(rotary.rotate(x, slice(0, length)) for rotary in ROTARIES)
        torch.testing.assert_close(ran(session, x=x), turned, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
def test_dropout_is_refused() -> None:
    with pytest.raises(torch.onnx.OnnxExporterError) as error:
        torch.onnx.export(
            Causal().train(), (torch.randn(2, 7, 24),), dynamo=True, opset_version=23, verbose=False,
            custom_translation_table=headscope.onnx.translations(),
        )  # fmt: skip
    assert "dropout: got 0.5, which ONNX's Attention does not support; export the module in eval mode" in str(
        error.value
    )


def test_without_onnxscript_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match="onnxscript"):
        headscope.onnx.translations()


@pytest.mark.parametrize("codes", [[8], [0, 1, 0, 9]], ids=str)
def test_masks_of_another_version_are_refused(codes: list[int]) -> None:
    masks_of_call = headscope.onnx._Masks(MagicMock(), MagicMock(), MagicMock())
    with pytest.raises(ValueError, match=r"mask: got the code \d, which this version of headscope does not define"):
        masks_of_call.of(codes, [])


@pytest.mark.parametrize("reproducible", [False, True])
def test_an_export_without_translations_names_them(reproducible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "_translated", False)  # as in a process that has not called translations()
    model = MultiHeadAttention(8, 2, reproducible=reproducible).eval()
    remedy = r"expected custom_translation_table=headscope\.onnx\.translations\(\) and opset_version=23"
    with (
        pytest.warns(UserWarning, match=remedy),
        pytest.raises(torch.onnx.OnnxExporterError, match=r"headscope\.(attend_forward|linear)"),
    ):
        torch.onnx.export(model, (torch.randn(1, 4, 8),), dynamo=True, opset_version=23, verbose=False)


def test_an_export_with_translations_gives_no_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"torch\.onnx\.export: headscope")
        exported(MultiHeadAttention(8, 2), (torch.randn(1, 4, 8),), None, tmp_path / "a.onnx")
