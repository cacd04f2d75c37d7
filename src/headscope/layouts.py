"""Weights from other modules and to them: which key holds what, and in what form.

``MultiHeadAttention.from_module(module)`` and ``.from_state_dict(state, layout)`` make one of ours; ``to_state_dict``
goes the other way. Nothing is unpickled: a state is a mapping of tensors or arrays, or a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headscope._attend.call import FLOATS
from headscope._layouts.expressible import changed_calls, check_calls, check_expressible, check_rotary
from headscope._layouts.table import HEADS, LAYOUTS, PROJECTIONS, QKV, Layout, Part, cut, read, write
from headscope._linear.layer import is_linear, unknown_projections
from headscope._support.arguments import check_layout, kind, whole
from headscope._support.files import is_inside
from headscope.module import MultiHeadAttention
from headscope.module._pruning import check_kept
from headscope.positions import RelativeBias

__all__ = ["from_module", "from_state_dict", "known", "to_state_dict"]

State = Mapping[str, Any]
"""Tensors, or arrays that numpy can read, by key."""
Made = TypeVar("Made", bound=MultiHeadAttention)
SHOWN = 6  # keys in a message


def known() -> dict[str, str]:
    """The names of the layouts, and whose each is."""
    return {layout.name: layout.of for layout in LAYOUTS.values()}


def from_module(
    module: nn.Module, layout: str | None = None, *, into: type[Made] = MultiHeadAttention, **options: Any
) -> Made:
    """A ``MultiHeadAttention`` with copies of another module's weights, in its dtype, on its device, in its mode.

    Args:
        module: of a class that ``known`` layouts have; or of any class, where ``layout`` says which keys it has, or
            its keys are those of a tutorial or of timm and leave no doubt.
        layout: one of ``known()``.
        into: the class to make.
        options: of ``MultiHeadAttention``, where they are not to be read from the module, as ``num_heads``, ``rotary``.

    What a module's forward does around its attention (dropout of the output, residual, norm) is not part of it, and
    neither are its hooks.

    Raises:
        TypeError: it is no module, or already ours.
        ValueError: no layout is known for it, or its weights do not fit; the message says which keys, and what is
            known. Or no ``layout`` is given, and something else than its weights may say what it computes: a forward
            of its own, in its class or set on it or on a part; a projection that is more than a linear, or has hooks.
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"module: got {kind(module)}, wanted a torch.nn.Module")
    if isinstance(module, MultiHeadAttention):
        raise TypeError("module: is a headscope.MultiHeadAttention already; copy.deepcopy makes another")
    check_kept(module, *module.modules())
    state = module.state_dict(keep_vars=True)
    found = _recognised(module, set(state)) if layout is None else _named(layout)
    made, keys = _made(found, _state(state, ""), into, _options(module, found, options))
    if "rotary" in options:
        check_rotary("rotary", found, made)
    learns = {key: isinstance(x, Tensor) and x.requires_grad for key, x in state.items()}
    for name, parameter in made.named_parameters():
        sources = [learns[keys[ours]] for ours in _our_names(name) if ours in keys]
        if sources:  # a table that was passed in stays as it is
            parameter.requires_grad_(any(sources))
    return made.train(module.training)


def from_state_dict(
    state: State | str | Path, layout: str, *, prefix: str = "", into: type[Made] = MultiHeadAttention, **options: Any
) -> Made:
    """A ``MultiHeadAttention`` with copies of the weights in a state dict, in their dtype and on their device.

    Args:
        state: tensors or arrays by key; or the path of a safetensors file, or of the ``.index.json`` of several, of
            which only what begins with ``prefix`` is read.
        layout: one of ``known()``.
        prefix: what the keys of this one attention begin with, as ``"model.layers.0.self_attn."``; other keys are left
            alone.
        into: the class to make.
        options: of ``MultiHeadAttention``: what weights do not tell, as ``num_heads``, and ``rotary`` of a layout that
            has it. Sizes and biases come from the weights.

    Raises:
        TypeError: a state or an option of the wrong kind.
        ValueError: an unknown layout, keys that are missing or unexpected, sizes that do not fit, an option that is
            missing or contradicts the weights, a ``rotary`` that the layout does not have, an index that names what
            its files do not have.
        FileNotFoundError: there is no such file.
    """
    found = _named(layout)
    made, _ = _made(found, _state(state, prefix), into, options)
    if "rotary" in options:
        check_rotary("rotary", found, made)
    return made


def _made(
    found: Layout, taken: dict[str, Any], into: type[Made], options: dict[str, Any]
) -> tuple[Made, dict[str, str]]:
    """The module, and the key that each of its tensors, by our name, came from."""
    missing, unexpected = found.fit(set(taken))
    if missing or unexpected:
        fits = [other.name for other in LAYOUTS.values() if other.fit(set(taken)) == ([], [])]
        hint = f"; these keys are those of {_listed(fits)}" if fits else f"; known layouts: {_listed(LAYOUTS, 99)}"
        raise ValueError(f"state: does not fit layout {found.name!r}: {_amiss(missing, unexpected)}{hint}")
    tensors, keys, cuts = _ours(found, taken)
    sizes = _sizes(found, tensors, keys, cuts, options)
    for name in ("bias_k", "bias_v"):
        if name in tensors:
            tensors[name] = tensors[name].unflatten(0, (sizes["kv_heads"], -1))  # [Hkv, D]
    extras = _extras(found, tensors, keys, sizes, options)
    if isinstance(extras.get("position_bias"), RelativeBias):  # another layer's: shared, and left as it is
        tensors["position_bias.weight"] = extras["position_bias"].weight
    made = into(**sizes, **extras, device="meta")
    frozen = made.sinks is not None and "sinks" in found.more  # add_zero_attn=True, on the other side
    if frozen:
        tensors["sinks"] = tensors["q.weight"].new_zeros(made.num_heads)
    _check_places(found, made, tensors, keys)
    made.load_state_dict({_our_key(name): x for name, x in tensors.items()}, assign=True)
    if frozen and made.sinks is not None:
        made.sinks.requires_grad_(False)
    return made, keys


def _check_places(layout: Layout, made: MultiHeadAttention, tensors: dict[str, Tensor], keys: dict[str, str]) -> None:
    """Whether what there is has a place in what was made, and the other way round."""
    places = _parameters(made)
    if lacking := [name for name in places if name not in tensors]:
        raise ValueError(f"options: layout {layout.name!r} has no weights for {_listed(lacking)}, which they call for")
    for name, x in tensors.items():
        wanted = list(places[name].shape) if name in places else "none: the options leave no place for it"
        if list(x.shape) != wanted:
            raise ValueError(f"{keys.get(name, name)}: holds {name} as {list(x.shape)}, wanted {wanted}")


def to_state_dict(module: MultiHeadAttention, layout: str, *, prefix: str = "") -> dict[str, Tensor]:
    """Copies of a module's weights under the keys of a layout.

    A bias that the layout always has is zero where the module has none. A state dict holds weights alone: the other
    side must set the number of heads, the scale, base and scaling of rotary, and dropout.

    Args:
        layout: one of ``known()``.
        prefix: put before each key.

    Raises:
        ValueError: an unknown layout; an option of the module that this layout has no place for; a forward of its own,
            in its class or set on it or on a part; or a part with hooks.
    """
    found = _named(layout)
    for name, part in unknown_projections(module).items():
        raise ValueError(f"module: {name} is a {type(part).__name__}, wanted nn.Linear, or one with its forward")
    check_calls(module)
    tensors = _parameters(module)
    check_expressible(module, found, tensors)
    cuts = _cuts(module.num_heads, module.kv_heads, module.head_dim, module.v_head_dim)
    written: dict[str, Tensor] = {}
    for part in found.parts:
        there = [name for name in part.holds if name in tensors]
        if not there and part.optional:
            continue
        each = [tensors[name] if name in tensors else _no_bias(module, name) for name in part.holds]
        x = each[0] if len(each) == 1 else torch.cat(each)
        x = write(part, x, cuts.get(part.holds[0].split(".")[0], (1, 1)))
        written[_prefix(prefix) + part.key] = x.clone(memory_format=torch.contiguous_format)
    return written


# ---------------------------------------------------------------- which layout


def _named(layout: str) -> Layout:
    if not isinstance(layout, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"layout: got {kind(layout)}, wanted a name, one of {_listed(LAYOUTS, 99)}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, wanted one of {_listed(LAYOUTS, 99)}")
    return LAYOUTS[layout]


def _recognised(module: nn.Module, keys: set[str]) -> Layout:
    """The layout of a module: by its class, else by its keys, where those say all there is to know."""
    names = {_full_name(each) for each in type(module).__mro__}
    ours = [layout for layout in LAYOUTS.values() if names & set(layout.classes)]
    fitting = [layout for layout in ours or LAYOUTS.values() if layout.fit(keys) == ([], [])]
    plain = [layout for layout in fitting if layout in ours or layout.plain]
    name = type(module).__name__
    if plain:
        for beside in _beside_weights(module, plain[0]):
            raise ValueError(
                f"module: {beside}, so that its weights may not say what it computes; pass "
                f"layout={plain[0].name!r} if they do"
            )
        return plain[0]
    for layout in LAYOUTS.values():
        if name in layout.inner:
            parent = layout.classes[0].split(":")[1]
            raise ValueError(f"module: {name} is a part of {parent}, which has all four projections; pass that")
    if fitting:
        hint = f"its keys are those of {_listed([each.name for each in fitting])}: pass layout= if its forward is, too"
    else:
        nearest = min(ours or LAYOUTS.values(), key=lambda each: sum(map(len, each.fit(keys))))
        hint = f"nearest is {nearest.name!r}: {_amiss(*nearest.fit(keys))}"
    raise ValueError(f"module: no layout is known for {name}; {hint}; known layouts: {_listed(LAYOUTS, 99)}")


def _beside_weights(module: nn.Module, layout: Layout) -> Iterator[str]:
    """What may make of the weights something else than this layout does, in words.

    Hooks of the module itself, which may only look, as those that transformers leaves there, run around the attention.
    """
    if (of := _with_other_forward(type(module).__mro__)) is not None:
        yield f"{type(module).__name__} is a {of} with a forward of its own"
    yield from changed_calls(module, [path for held in layout.parts if (path := held.key.rpartition(".")[0])])
    weights = {f"{name}.weight" for name in PROJECTIONS}
    parts = dict(module.named_modules(remove_duplicate=False))
    for held in layout.parts:
        path = held.key.rpartition(".")[0]
        if not path or path not in parts:
            continue
        part = parts[path]
        wanted, fits = ("Conv1D", _is_conv) if held.form == "columns" else ("Linear", is_linear)
        if held.holds[0] in weights and not fits(part):
            yield f"{path} is a {type(part).__name__}, whose forward is not that of a {wanted}"


def _is_conv(part: nn.Module) -> bool:
    """Whether it is the transposed linear of transformers' GPT-2, by the class that its forward is of."""
    return _full_name(next(each for each in type(part).__mro__ if "forward" in vars(each))) == "transformers:Conv1D"


def _with_other_forward(mro: tuple[type, ...]) -> str | None:
    """The known class that a class inherits from, if it does not take its forward from there."""
    known = {name for layout in LAYOUTS.values() for name in layout.classes}
    for n, each in enumerate(mro):
        if _full_name(each) in known:
            return each.__name__ if any("forward" in vars(below) for below in mro[:n]) else None
    return None


def _full_name(kind_of: type) -> str:
    """As the table has it, "package:Class"."""
    return f"{kind_of.__module__.split('.')[0]}:{kind_of.__name__}"


def _options(module: nn.Module, layout: Layout, given: dict[str, Any]) -> dict[str, Any]:
    """Our options: those given, and what the module's attributes say of the others."""
    told: dict[str, Any] = {}
    for option, paths in layout.reads.items():
        if option in given:
            continue
        try:
            values: list[Any] = [attrgetter(path)(module) for path in paths.split()]
        except AttributeError:  # of another class, with the same keys: ``needs`` says what must be given
            continue
        if any(value != values[0] for value in values[1:]):
            said = ", ".join(f"{path} is {value}" for path, value in zip(paths.split(), values, strict=True))
            raise ValueError(f"module: {said}; wanted one number, as ours has one {option}")
        told[option] = _told(option, values[0], module)
    if "num_heads" in layout.needs and "num_heads" not in told:
        named = [value for name in HEADS if isinstance(value := getattr(module, name, None), int)]
        told |= {"num_heads": named[0]} if named else {}
    if layout.plain or _is_of(module, layout):
        told |= {option: tell(module) for option, tell in layout.more.items() if option not in given}
    return {**told, **given}


def _told(option: str, value: Any, module: nn.Module) -> Any:
    """What an attribute comes to as an option of ours."""
    if isinstance(value, nn.Dropout):
        return value.p
    if option == "qk_norm_eps" and value is None:  # of nn.RMSNorm: that of the type that it computes in
        double = next(module.parameters()).dtype == torch.float64
        return torch.finfo(torch.float64 if double else torch.float32).eps
    return value.item() if isinstance(value, Tensor) and value.ndim == 0 and not value.is_meta else value


def _is_of(module: nn.Module, layout: Layout) -> bool:
    names = {each.split(":")[1] for each in layout.classes}
    return any(each.__name__ in names for each in type(module).__mro__)


# ---------------------------------------------------------------- reading a state


def _state(state: State | str | Path, prefix: str) -> dict[str, Any]:
    """What begins with the prefix, without it."""
    prefix = _prefix(prefix)
    if isinstance(state, (str, Path)):
        taken = _read_safetensors(Path(state), prefix)
    elif isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        taken = {key: state[key] for key in state if str(key).startswith(prefix)}
    else:
        raise TypeError(f"state: got {kind(state)}, wanted a mapping of tensors, or the path of a safetensors file")
    if isinstance(state, Mapping) and not state:
        raise ValueError("state: is empty, wanted a mapping of tensors")
    if not taken:
        there = _listed(state) if isinstance(state, Mapping) else str(state)
        raise ValueError(f"prefix: no key begins with {prefix!r}; {there}")
    for key in taken:
        if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"state: has the key {key!r} of {kind(key)}, wanted strings")
    return {key.removeprefix(prefix): x for key, x in taken.items()}


def _read_safetensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """What begins with the prefix in one file, or in those that a ``.index.json`` beside them names."""
    if not (path.name.endswith(".index.json") and path.is_file()):
        return _read_file(path, prefix)
    places = {key: file for key, file in _weight_map(path).items() if key.startswith(prefix)}
    found: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        found |= _read_file(path.parent / file, prefix, {key for key, where in places.items() if where != file})
    if lacking := [f"{key} in {file}" for key, file in places.items() if key not in found]:
        raise ValueError(f"state: {path} names {_listed(lacking)}, but it is not there: the checkpoint is damaged")
    return found


def _read_file(path: Path, prefix: str, elsewhere: Collection[str] = ()) -> dict[str, Tensor]:
    """What begins with the prefix in one file, but for keys that are another's by the index."""
    if path.exists() and not path.is_file():
        what = "a directory, wanted a safetensors file in it" if path.is_dir() else "no file, wanted a safetensors file"
        raise ValueError(f"state: {path} is {what}, or its .index.json")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            there = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118
            return {key: file.get_tensor(key) for key in there if key not in elsewhere}
    except SafetensorError as error:
        raise ValueError(f"state: {path} is no safetensors file ({error}); pickles are not read") from error


def _weight_map(path: Path) -> dict[str, str]:
    """Which file each key is in."""
    try:
        said: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"state: {path} is no JSON ({error})") from error
    places: Any = said.get("weight_map") if isinstance(said, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):  # pyright: ignore[reportUnknownVariableType]
        raise ValueError(f'state: {path} has no "weight_map" of keys and the files that they are in')
    for file in cast("dict[str, str]", places).values():
        if not is_inside(file):
            raise ValueError(f"state: {path}: weight_map: expected a file in the same folder, got {file!r}")
    return places  # pyright: ignore[reportUnknownVariableType]


def _prefix(prefix: str) -> str:
    if not isinstance(prefix, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"prefix: got {kind(prefix)}, wanted what the keys begin with, as a string")
    return prefix if not prefix or prefix[-1] in "./" else f"{prefix}."


def _ours(
    layout: Layout, state: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, tuple[int, int]]]:
    """Our tensors by our names, as copies, the key that each came from, and the heads that its axes tell."""
    tensors: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    cuts: dict[str, tuple[int, int]] = {}
    for part in layout.parts:
        if part.key not in state:
            continue
        there = _tensor(part, state[part.key])
        x, heads = read(part, there), cut(part, there)
        if x.shape[0] % len(part.holds):
            raise ValueError(
                f"{part.key}: holds {', '.join(part.holds)}, but its {x.shape[0]} rows are not divisible by "
                f"{len(part.holds)}; it is {list(there.shape)}"
            )
        for name, own in zip(part.holds, x.chunk(len(part.holds)), strict=True):
            tensors[name] = own.detach().clone(memory_format=torch.contiguous_format)
            keys[name] = part.key
            cuts |= {} if heads is None else {name: heads}
    first = tensors["q.weight"]
    for name, x in tensors.items():
        if x.dtype != first.dtype or x.device != first.device:
            got, wanted = f"{kind(x)} on {x.device}", f"{kind(first)} on {first.device}, as {keys['q.weight']}"
            raise ValueError(f"{keys[name]}: is {got}, wanted {wanted}")
    return tensors, keys, cuts


def _tensor(part: Part, x: Any) -> Tensor:
    """One entry of a state, with the axes that its form has."""
    if isinstance(x, np.ndarray):  # torch reads neither the other byte order nor what is turned round
        x = np.array(x, x.dtype.newbyteorder("="), order="C")
    try:
        tensor = x if isinstance(x, Tensor) else torch.tensor(x, device="cpu")  # a copy: arrays may not be writable
    except (TypeError, ValueError, RuntimeError):
        got = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else kind(x)
        raise TypeError(f"{part.key}: got {got}, wanted a tensor or an array of numbers") from None
    if is_lazy(tensor):
        raise ValueError(f"{part.key}: is uninitialised, wanted weights; a lazy module gets them in its first call")
    check_layout(part.key, tensor)
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{part.key}: dtype is {kind(tensor)}, wanted float32, bfloat16, float16 or float64")
    flat = part.holds[0].split(".")[-1] == "bias" or "_norm." in part.holds[0]
    axes = {"rows": 1 if flat else 2, "columns": 2, "to heads": 2 if flat else 3, "from heads": 3, "token": 3}[
        part.form
    ]
    if tensor.ndim != axes:
        raise ValueError(f"{part.key}: has {tensor.ndim} axes, wanted {axes}; it is {list(tensor.shape)}")
    return tensor


def _sizes(
    layout: Layout,
    tensors: dict[str, Tensor],
    keys: dict[str, str],
    cuts: dict[str, tuple[int, int]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """The sizes that the weights have, for ``MultiHeadAttention``; and whether they fit each other."""
    if "q.weight" in cuts:
        told = cuts["q.weight"][0]
        if (got := options.get("num_heads", told)) != told:
            raise ValueError(f"num_heads: got {got!r}, wanted {told}, as {keys['q.weight']} has")
        options = {**options, "num_heads": told}
    lacking = [name for name in layout.needs if name not in options]
    if lacking:
        raise ValueError(f"{lacking[0]}: the weights do not tell it, so that layout {layout.name!r} needs it")
    heads = whole("num_heads", options["num_heads"])
    rows = {name: len(tensors[f"{name}.weight"]) for name in QKV}
    where = {name: f"{keys[f'{name}.weight']}: its {rows[name]} rows of {name} are" for name in QKV}
    if rows["q"] % heads:
        raise ValueError(f"{where['q']} not divisible by num_heads, {heads}")
    head_dim = rows["q"] // heads
    if not head_dim or not rows["k"] or rows["k"] % head_dim or heads % (rows["k"] // head_dim):
        raise ValueError(f"{where['k']} not a divisor of num_heads {heads} times head_dim {head_dim}")
    kv_heads = rows["k"] // head_dim
    if kv_heads != heads and not layout.grouped:
        raise ValueError(f"{where['k']} {kv_heads} heads of {head_dim}, wanted {heads}, as q has")
    if rows["v"] % kv_heads:
        raise ValueError(f"{where['v']} not divisible by the {kv_heads} heads of k")
    v_head_dim = rows["v"] // kv_heads
    embed_dim = tensors["q.weight"].shape[1]
    wanted = {"out.weight": [embed_dim, heads * v_head_dim], "out.bias": [embed_dim]}
    wanted |= {f"{name}.bias": [rows[name]] for name in QKV}
    wanted |= {f"bias_{name}": [rows[name]] for name in ("k", "v")}
    wanted |= {f"{name}_norm.{part}": [head_dim] for name in ("q", "k") for part in ("weight", "bias")}
    for name, shape in wanted.items():
        if name in tensors and list(tensors[name].shape) != shape:
            raise ValueError(f"{keys[name]}: holds {name} as {list(tensors[name].shape)}, wanted {shape}")
    cut_as = _cuts(heads, kv_heads, head_dim, v_head_dim)
    for name, (count, width) in cuts.items():
        if (count, width) != (fit := cut_as[name.split(".")[0]]):
            raise ValueError(f"{keys[name]}: has {count} heads of {width}, wanted {fit[0]} of {fit[1]}")
    biased = tuple(name for name in QKV if f"{name}.bias" in tensors)
    sizes: dict[str, Any] = {
        "embed_dim": embed_dim, "num_heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
        "v_head_dim": v_head_dim, "kdim": tensors["k.weight"].shape[1], "vdim": tensors["v.weight"].shape[1],
        "bias": biased, "out_bias": "out.bias" in tensors, "dtype": tensors["q.weight"].dtype,
    }  # fmt: skip
    if "bias_k" in tensors or "bias_v" in tensors:
        sizes["bias_kv"] = True
    told = {**sizes, "device": tensors["q.weight"].device, **layout.fixed}
    for name, value in options.items():
        if name != "num_heads" and name in told:
            raise ValueError(f"{name}: got {value!r}, wanted none: it comes from the weights, which say {told[name]!r}")
    return sizes


def _cuts(heads: int, kv_heads: int, head_dim: int, v_head_dim: int) -> dict[str, tuple[int, int]]:
    """Into how many heads of what width each projection is cut."""
    q, k, v, out = (heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (heads, v_head_dim)
    return {"q": q, "k": k, "v": v, "out": out}


def _extras(
    layout: Layout, tensors: dict[str, Tensor], keys: dict[str, str], sizes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The options that are no sizes: those given, those the layout fixes, those that weights call for."""
    extras: dict[str, Any] = {**options, **layout.fixed}
    extras.pop("num_heads", None)
    extras.setdefault("scale", layout.scales(sizes["embed_dim"], sizes["head_dim"])[0])
    norms = [name for name in tensors if name.startswith(("q_norm.", "k_norm."))]
    if norms and "qk_norm" not in extras:
        if not any(name.endswith("bias") for name in norms):
            raise ValueError(f'qk_norm: layout {layout.name!r} does not tell the kind of q_norm; pass "rms" or "layer"')
        extras["qk_norm"] = "layer"
    if "position_bias.weight" in tensors:
        if "position_bias" not in extras:
            raise ValueError(
                "position_bias: there is a table of biases by distance; pass positions.T5Buckets with its num_buckets "
                f"({len(tensors['position_bias.weight'])}), max_distance and direction"
            )
        if isinstance(extras["position_bias"], RelativeBias):
            own = keys["position_bias.weight"]
            raise ValueError(f"position_bias: got a RelativeBias beside {own}, another table; wanted one of them")
    return extras


# ---------------------------------------------------------------- writing one


def _our_key(name: str) -> str:
    """Our name of a tensor as a key of our state dict: q.weight is q_proj.weight."""
    first, _, rest = name.partition(".")
    return f"{first}_proj.{rest}" if first in PROJECTIONS else name


def _our_names(key: str) -> list[str]:
    """The inverse; a packed projection holds three."""
    first, _, rest = key.partition(".")
    if first == "qkv_proj":
        return [f"{name}.{rest}" for name in QKV]
    first = first.removesuffix("_proj")
    return [f"{first}.{rest}" if first in PROJECTIONS else key]


def _parameters(module: MultiHeadAttention) -> dict[str, Tensor]:
    """A module's parameters by our names."""
    found: dict[str, Tensor] = {}
    for name in PROJECTIONS:
        weight, bias = module.projection(name)
        found |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    rest = {name: x for name, x in module.named_parameters() if name.split(".")[0].removesuffix("_proj") not in
            (*PROJECTIONS, "qkv")}  # fmt: skip
    return {name: x.detach() for name, x in {**found, **rest}.items()}


def _no_bias(module: MultiHeadAttention, name: str) -> Tensor:
    """Return zeros for a bias that the module does not have."""
    weight, _ = module.projection(name.split(".")[0])
    return weight.new_zeros(len(weight))


# ---------------------------------------------------------------- words


def _amiss(missing: list[str], unexpected: list[str]) -> str:
    said = [f"{word} {_listed(keys)}" for word, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    return "; ".join(said)


def _listed(names: Iterable[Any], most: int = SHOWN) -> str:
    """Names, and how many more there are."""
    every = [str(name) for name in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
