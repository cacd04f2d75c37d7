"""The table of layouts: the keys and forms in which other modules store their weights.

A layout is data. Each part maps a key to headscope's tensors: ``q.weight`` [H * D, E], ``k.weight``, ``v.weight`` and
``out.weight`` [E, H * Dv] with rows ordered by head, their biases, and the tensors that options add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from headscope._linear import PROJECTIONS, QKV
from headscope.positions import NTK, LinearScaling, Llama3, Rotary, T5Buckets, YaRN

Form = Literal["rows", "columns", "to heads", "from heads", "token"]
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "h")
"""Attribute names for the number of heads, for modules of unknown class."""


@dataclass(frozen=True)
class Part:
    """One key of a layout.

    Attributes:
        key: as in the state dict.
        holds: the names of headscope's tensors under the key, concatenated along the rows.
        form: "rows": [rows, width], as ``nn.Linear`` (or [rows], a bias); "columns": [width, rows]; "to heads":
            [width, H, D] (a bias: [H, D]); "from heads": [H, D, width]; "token": [1, 1, H * D].
        optional: it may be missing.
    """

    key: str
    holds: tuple[str, ...]
    form: Form = "rows"
    optional: bool = False


@dataclass(frozen=True)
class Layout:
    """The keys of a kind of module, and how its forward uses the weights.

    Attributes:
        name: the argument ``layout`` that selects it.
        of: its origin, in a few words.
        parts: its keys.
        classes: "package:Class" of the modules that use it.
        inner: classes of modules that hold only a part of it.
        reads: which attribute of such a module holds which option of headscope; two attributes must be equal.
        more: options that require more than an attribute.
        needs: options that the weights do not determine: they come from the module, or from the caller.
        fixed: options that such a module always has.
        scales: the scales that its configuration can set, from embed_dim and head_dim; the default first.
        by_layer: its configuration can divide the scale by the number of the layer, from 1.
        ignores: keys that are not weights of the attention.
        plain: its keys determine the computation, so a module of unknown class with these keys is recognised.
        grouped: it may have fewer key/value heads than heads.
        widths: which of ``head_dim``, ``v_head_dim``, ``kdim`` and ``vdim`` may differ from the default.
    """

    name: str
    of: str
    parts: tuple[Part, ...]
    classes: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    reads: Mapping[str, str] = field(default_factory=dict[str, str])
    more: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Callable[[Any], Any]])
    needs: tuple[str, ...] = ("num_heads",)
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scales: Callable[[int, int], tuple[float, ...]] = lambda embed_dim, head_dim: (head_dim**-0.5,)
    by_layer: bool = False
    ignores: tuple[str, ...] = ()
    plain: bool = False
    grouped: bool = False
    widths: tuple[str, ...] = ()

    def fit(self, keys: set[str]) -> tuple[list[str], list[str]]:
        """Return the keys that are missing, and those that are unexpected."""
        missing = [part.key for part in self.parts if not part.optional and part.key not in keys]
        known = {part.key for part in self.parts}
        unexpected = [key for key in keys - known if not any(key == name or key.startswith(f"{name}.")
                                                             for name in self.ignores)]  # fmt: skip
        return missing, sorted(unexpected)


@dataclass(frozen=True)
class HeadSplit:
    """How many heads a projection is split into, and the width of each."""

    count: int
    width: int


def split_of(part: Part, x: Tensor) -> HeadSplit | None:
    """Return the heads that the axes of an entry show; None if they do not."""
    match part.form:
        case "to heads":
            return HeadSplit(x.shape[-2], x.shape[-1])
        case "from heads":
            return HeadSplit(x.shape[0], x.shape[1])
        case _:
            return None


def read_part(part: Part, x: Tensor) -> Tensor:
    """Return the entry of a key as [rows, width], or [rows]."""
    match part.form:
        case "rows":
            return x
        case "columns":
            return x.T
        case "to heads":
            return x.flatten() if x.ndim == 2 else x.flatten(1).T
        case "from heads":
            return x.flatten(0, 1).T
        case "token":
            return x.flatten()


def write_part(part: Part, x: Tensor, split: HeadSplit) -> Tensor:
    """Return the entry of a key from [rows, width], or [rows]: the inverse of ``read_part``."""
    heads = split.count, split.width
    match part.form:
        case "rows":
            return x
        case "columns":
            return x.T
        case "to heads":
            return x.unflatten(0, heads) if x.ndim == 1 else x.T.unflatten(1, heads)
        case "from heads":
            return x.T.unflatten(0, heads)
        case "token":
            return x.flatten()[None, None]


# ---------------------------------------------------------------- shared parts

WIDTHS = ("head_dim", "v_head_dim", "kdim", "vdim")


def linears(names: str, biases: str = "q k v out", maybe: str = "") -> tuple[Part, ...]:
    """Return four ``nn.Linear`` named ``names``, for q, k, v and out; with those that have, or may have, a bias."""
    parts: list[Part] = []
    for ours, theirs in zip(PROJECTIONS, names.split(), strict=True):
        parts.append(Part(f"{theirs}.weight", (f"{ours}.weight",)))
        if ours in biases.split() or ours in maybe.split():
            parts.append(Part(f"{theirs}.bias", (f"{ours}.bias",), optional=ours in maybe.split()))
    return tuple(parts)


def packed(name: str, parts: tuple[str, ...] = QKV, form: Form = "rows", *, maybe: bool = False) -> tuple[Part, ...]:
    """Return one linear for several projections, concatenated along the rows."""
    return (
        Part(f"{name}.weight", tuple(f"{part}.weight" for part in parts), form),
        Part(f"{name}.bias", tuple(f"{part}.bias" for part in parts), optional=maybe),
    )


def norms(*parts: str, maybe: bool = False) -> tuple[Part, ...]:
    """Return norms of q and k under headscope's names."""
    keys = [f"{name}.{part}" for name in ("q_norm", "k_norm") for part in parts]
    return tuple(Part(key, (key,), optional=maybe) for key in keys)


def kernels() -> tuple[Part, ...]:
    """Return the parts of Keras: einsum kernels of three axes."""
    parts: list[Part] = []
    for ours, theirs in zip(PROJECTIONS, ("query", "key", "value", "attention_output"), strict=True):
        form: Form = "from heads" if ours == "out" else "to heads"
        parts.append(Part(f"{theirs}/kernel", (f"{ours}.weight",), form))
        parts.append(Part(f"{theirs}/bias", (f"{ours}.bias",), "rows" if ours == "out" else form, optional=True))
    return tuple(parts)


OWN_KEYS = (Part("bias_k", ("bias_k",), "token", optional=True), Part("bias_v", ("bias_v",), "token", optional=True))
TORCH_OUT = (Part("out_proj.weight", ("out.weight",)), Part("out_proj.bias", ("out.bias",), optional=True))
TORCH_IN_BIAS = Part("in_proj_bias", ("q.bias", "k.bias", "v.bias"), optional=True)


# ---------------------------------------------------------------- options that require more than an attribute


def rotary(module: Any) -> Rotary:
    """Return the rotary positions of the configuration of a transformers model.

    Raises:
        ValueError: a kind of scaling that ``Rotary`` does not support, or one for each kind of layer.
    """
    config = module.config
    parameters: dict[str, Any] = dict(config.rope_parameters)
    if "rope_theta" not in parameters:
        raise ValueError(
            f"module: its config has rope_parameters for each kind of layer ({', '.join(parameters)}); pass rotary="
        )
    kind, trained = parameters.get("rope_type", "default"), parameters.get("original_max_position_embeddings", 0)
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = LinearScaling(parameters["factor"])
        case "dynamic":
            scaling = NTK(parameters["factor"], config.max_position_embeddings)
        case "llama3":
            scaling = Llama3(
                parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"], trained
            )
        case "yarn":
            names = ("attention_factor", "mscale", "mscale_all_dim", "truncate", "beta_fast", "beta_slow")
            options = {name: parameters[name] for name in names if parameters.get(name) is not None}
            scaling = YaRN(parameters.get("factor") or config.max_position_embeddings / trained, trained, **options)
        case _:
            raise ValueError(
                f"module: its rope_type is {kind!r}; expected default, linear, dynamic, llama3 or yarn, or pass rotary="
            )
    # the default of these models rotates whole heads, whatever the factor
    share = 1.0 if kind == "default" else parameters.get("partial_rotary_factor", 1.0)
    dim = int(module.head_dim * share)
    return Rotary(dim, float(parameters["rope_theta"]), scaling=scaling)


def buckets(module: Any) -> T5Buckets | None:
    """Return the buckets of a T5 layer that has a table; None for the other layers, which reuse its biases."""
    if not module.has_relative_attention_bias:
        return None
    sizes = module.relative_attention_num_buckets, module.relative_attention_max_distance
    return T5Buckets(*sizes, bidirectional=not module.is_decoder)


def kind_of_norm(module: Any) -> str | None:
    """Return the kind of the norms of q and k in timm, by their classes.

    Raises:
        ValueError: a class that is neither torch's nor recognisable by name, or different classes for q and k.
    """
    kinds: dict[str, str | None] = {}
    for name in ("q_norm", "k_norm"):
        norm = getattr(module, name, None)
        class_name = type(norm).__name__
        if norm is None or isinstance(norm, nn.Identity):
            kinds[name] = None
        elif isinstance(norm, nn.LayerNorm):
            kinds[name] = "layer"
        elif isinstance(norm, nn.RMSNorm) or "rmsnorm" in class_name.lower().replace("_", ""):
            kinds[name] = "rms"
        else:
            raise ValueError(
                f'module: {name} is a {class_name}, an unknown kind of norm; pass qk_norm="rms" or "layer"'
            )
    if kinds["q_norm"] != kinds["k_norm"]:
        raise ValueError(f"module: q_norm is {kinds['q_norm']!r} and k_norm {kinds['k_norm']!r}, expected one kind")
    return kinds["q_norm"]


def zero_sink(module: Any) -> bool:
    """Return whether there is a sink of logit 0: the key and value of zeros that torch adds."""
    return bool(module.add_zero_attn)


# ---------------------------------------------------------------- the table


def torch_layouts() -> tuple[Layout, ...]:
    """Return the layouts of ``nn.MultiheadAttention``: one matrix for q, k and v, or three if widths differ."""
    separate = tuple(Part(f"{name}_proj_weight", (f"{name}.weight",)) for name in QKV)
    each: dict[str, Any] = {
        "classes": ("torch:MultiheadAttention", "headscope:MultiheadAttention"),
        "reads": {"num_heads": "num_heads", "dropout": "dropout"},
        "more": {"sinks": zero_sink},
    }
    rest = (*TORCH_OUT, *OWN_KEYS)
    in_proj = (Part("in_proj_weight", tuple(f"{name}.weight" for name in QKV)), TORCH_IN_BIAS)
    return (
        Layout("torch", "nn.MultiheadAttention", (*in_proj, *rest), **each),
        Layout(
            "torch_separate",
            "nn.MultiheadAttention with kdim or vdim",
            (*separate, TORCH_IN_BIAS, *rest),
            widths=("kdim", "vdim"),
            **each,
        ),
    )


def tutorial_layouts() -> tuple[Layout, ...]:
    """Return the layouts of tutorials: four linears; the number of heads is an attribute, or an argument."""

    def plain(name: str, names: str) -> Layout:
        return Layout(name, ", ".join(names.split()), linears(names, "", "q k v out"), plain=True, widths=WIDTHS)

    return (
        plain("q_linear", "q_linear k_linear v_linear out_proj"),
        plain("QKV", "Q K V o_w"),
        plain("query_key_value", "query key value out"),
        plain("w_q", "w_q w_k w_v w_o"),
        plain("W_q", "W_q W_k W_v W_o"),
        plain("Wq", "Wq Wk Wv Wo"),
        plain("wq", "wq wk wv wo"),
        Layout("tokeys", "toqueries, tokeys, tovalues without biases, unifyheads; scaled by sqrt(embed_dim)",
               linears("toqueries tokeys tovalues unifyheads", "out"), plain=True, widths=WIDTHS,
               scales=lambda embed_dim, head_dim: (embed_dim**-0.5,)),
    )  # fmt: skip


def gpt2_scales(embed_dim: int, head_dim: int) -> tuple[float, ...]:
    """Return the scales of GPT-2 with and without ``scale_attn_weights``."""
    return head_dim**-0.5, 1.0


def encoder_layouts() -> tuple[Layout, ...]:
    """Return the layouts of transformers' models without rotary positions."""
    usual = {"num_heads": "num_heads", "dropout": "dropout"}
    projections = "q_proj k_proj v_proj out_proj"
    bert = {"num_heads": "self.num_attention_heads", "dropout": "self.dropout", "scale": "self.scaling"}
    gpt2 = {"num_heads": "num_heads", "dropout": "attn_dropout", "scale": "scaling"}
    scaled: dict[str, Any] = {"scales": gpt2_scales, "by_layer": True}
    masks = ("bias", "masked_bias")  # buffers of old versions
    c_proj = packed("c_proj", ("out",), "columns")
    vit = {"num_heads": "num_attention_heads", "dropout": "attention_dropout", "scale": "scaling"}
    return (
        Layout("bert", "BERT: query, key, value, and the dense of the separate output module",
               linears("self.query self.key self.value output.dense"), ("transformers:BertAttention",),
               ("BertSelfAttention", "BertCrossAttention", "BertSelfOutput"), bert, ignores=("output.LayerNorm",)),
        Layout("distilbert", "DistilBERT", linears("q_lin k_lin v_lin out_lin"),
               ("transformers:DistilBertSelfAttention",),
               reads={"num_heads": "n_heads", "dropout": "dropout", "scale": "scaling"}),
        Layout("gpt2", "GPT-2, self-attention", (*packed("c_attn", form="columns"), *c_proj),
               ("transformers:GPT2Attention",), reads=gpt2, **scaled, ignores=masks),
        Layout("gpt2_cross", "GPT-2, cross-attention",
               (*packed("q_attn", ("q",), "columns"), *packed("c_attn", ("k", "v"), "columns"), *c_proj),
               ("transformers:GPT2Attention",), reads=gpt2, **scaled, ignores=masks),
        Layout("vit", "ViT", linears("q_proj k_proj v_proj o_proj", "out", "q k v"), ("transformers:ViTAttention",),
               reads=vit),
        Layout("vit_v4", "ViT, as on the hub and in transformers 4",
               linears("attention.query attention.key attention.value output.dense", "out", "q k v"),
               ("transformers:ViTAttention",), reads={**vit, "num_heads": "attention.num_attention_heads"}),
        Layout("clip", "CLIP, text and image", linears(projections), ("transformers:CLIPAttention",),
               reads={**usual, "scale": "scale"}),
        Layout("bart", "BART", linears(projections, "", "q k v out"), ("transformers:BartAttention",),
               reads={**usual, "scale": "scaling"}),
        Layout("whisper", "Whisper: keys without a bias", linears(projections, "", "q v out"),
               ("transformers:WhisperAttention",), reads={**usual, "scale": "scaling"}),
        Layout("t5", "T5: no scale, a bias by distance in the first layer",
               (*linears("q k v o", ""),
                Part("relative_attention_bias.weight", ("position_bias.weight",), optional=True)),
               ("transformers:T5Attention",), reads={"num_heads": "n_heads", "dropout": "dropout"},
               more={"position_bias": buckets}, scales=lambda embed_dim, head_dim: (1.0,), widths=("head_dim",)),
    )  # fmt: skip


def decoder_layouts() -> tuple[Layout, ...]:
    """Return the layouts of transformers' models with rotary positions and grouped heads; their masks are causal."""
    names = "q_proj k_proj v_proj o_proj"
    each: dict[str, Any] = {
        "reads": {"num_heads": "config.num_attention_heads", "dropout": "attention_dropout", "scale": "scaling"},
        "more": {"rotary": rotary},
        "needs": ("num_heads", "rotary"),
        "ignores": ("rotary_emb",),
        "grouped": True,
        "widths": ("head_dim",),
    }
    eps = {"qk_norm_eps": "q_norm.variance_epsilon k_norm.variance_epsilon"}
    qwen3: dict[str, Any] = {**each, "reads": {**each["reads"], **eps}, "fixed": {"qk_norm": "rms"}}
    any_bias = linears(names, "", "q k v out")
    return (
        Layout("llama", "Llama", any_bias, ("transformers:LlamaAttention",), **each),
        Layout("mistral", "Mistral", linears(names, ""), ("transformers:MistralAttention",), **each),
        Layout("qwen2", "Qwen2", linears(names, "q k v"), ("transformers:Qwen2Attention",), **each),
        Layout("qwen3", "Qwen3", (*any_bias, *norms("weight")), ("transformers:Qwen3Attention",), **qwen3),
    )


def other_layouts() -> tuple[Layout, ...]:
    """Return the layouts of other libraries."""
    timm = (*packed("qkv", maybe=True), *packed("proj", ("out",)), *norms("weight", "bias", maybe=True))
    return (
        Layout("timm", "timm's Attention", timm, ("timm:Attention",), more={"qk_norm": kind_of_norm}, plain=True,
               reads={"num_heads": "num_heads", "dropout": "attn_drop", "scale": "scale",
                      "qk_norm_eps": "q_norm.eps k_norm.eps"}),
        Layout("keras", "Keras MultiHeadAttention and GroupQueryAttention: query/kernel [E, H, D], ...", kernels(),
               needs=(), grouped=True, widths=WIDTHS),
    )  # fmt: skip


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        *torch_layouts(), *tutorial_layouts(), *encoder_layouts(), *decoder_layouts(), *other_layouts(),
    )
}  # fmt: skip
