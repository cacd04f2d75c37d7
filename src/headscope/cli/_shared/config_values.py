"""Checks of the values of a ``config.json``: sizes, the type of the model, and names of functions.

transformers raises a ZeroDivisionError or KeyError where a value is impossible, or builds layers until the memory is
full. The messages here name the key, the expected and the actual value, and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from headscope._support.text import visible
from headscope.cli._shared.folder_checks import count_tensors
from headscope.cli._shared.mistakes import Mistake

SIZES = {
    *("num_attention_heads", "num_heads", "n_head", "n_heads", "num_key_value_heads", "encoder_attention_heads"),
    *("decoder_attention_heads", "hidden_size", "n_embd", "d_model", "head_dim", "vocab_size"),
}
LAYERS = {
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
    "num_decoder_layers",
}
MOST_LAYERS = 10_000  # where the weights are not on this machine
DTYPE_KEYS = ("dtype", "torch_dtype")
DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")
REMEDY = "use the config.json that belongs to these weights"


def check_values(transformers: Any, name: str, raw: dict[str, Any]) -> None:
    """Check the type of the model, its sizes, and that the weights can have as many layers.

    Raises:
        Mistake: a value is impossible.
    """
    if "auto_map" not in raw:  # else transformers' own message: the repository's code is not run
        _check_model_type(transformers, name, raw)
    _check_names(name, raw)
    tensors = count_tensors(name, raw.get("transformers_weights"))
    for path, value in _values(raw):
        key = path.rpartition(".")[2]
        if key in SIZES | LAYERS and (isinstance(value, (str, float, bool)) or _below(value, key)):
            least = 0 if key in LAYERS else 1
            raise _mistake(name, path, f"expected an integer of at least {least}, got {value!r}; {REMEDY}")
        most = MOST_LAYERS if tensors is None else tensors
        if key in LAYERS and isinstance(value, int) and value > most:
            reason = "" if tensors is None else f", as the weights hold {tensors} tensors"
            raise _mistake(name, path, f"expected at most {most} layers{reason}, got {value}; {REMEDY}")


def check_default_layers(name: str, config: Any) -> None:
    """Check that the weights can have as many layers as a configuration has by default.

    Args:
        name: of the model.
        config: of transformers, built from a config.json that ``check_values`` has checked.

    Raises:
        Mistake: they cannot.
    """
    tensors = count_tensors(name, getattr(config, "transformers_weights", None))
    for key, value in sorted(config.to_dict().items()):
        if tensors is not None and key in LAYERS and isinstance(value, int) and value > tensors:
            expected = f"expected at most {tensors} layers, as the weights hold {tensors} tensors"
            got = f"got none, which makes {value} in {type(config).__name__}"
            raise _mistake(name, key, f"{expected}, {got}; {REMEDY}")


def _check_names(name: str, raw: dict[str, Any]) -> None:
    """Check the names of classes and of dtypes."""
    kinds: Any = raw.get("architectures") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise _mistake(name, "architectures", f"expected a list of names of classes, got {kinds!r}; {REMEDY}")
    for path, config in configs(raw):
        for key in DTYPE_KEYS:
            value: Any = config.get(key)
            for each in value.values() if isinstance(value, dict) else [value]:
                if each is not None and str(each).removeprefix("torch.") not in DTYPES:
                    problem = f"expected one of {', '.join(DTYPES)}, got {each!r}; {REMEDY}"
                    raise _mistake(name, path + key, problem)


def configs(raw: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a configuration and those of its parts, each with the keys that lead to it ("text_config.")."""
    yield path, raw
    for key, value in raw.items():
        if isinstance(value, dict) and (key.endswith("_config") or "model_type" in value):
            yield from configs(value, f"{path}{key}.")


def normalize_dtypes(raw: dict[str, Any]) -> None:
    """Write dtypes as transformers reads them: without "torch.", and nothing where the dtype is that of the weights."""
    for _, config in configs(raw):
        if config.get("dtype") is not None:
            config.pop("torch_dtype", None)
        for key in DTYPE_KEYS:
            value: Any = config.pop(key, None)
            by_part = value if isinstance(value, dict) else {"": value}
            parts = {part: x.removeprefix("torch.") for part, x in by_part.items() if x is not None}
            named = {part: dtype for part, dtype in parts.items() if dtype != "auto"}
            if named:
                config[key] = named if isinstance(value, dict) else named[""]


def _below(value: Any, key: str) -> bool:
    return isinstance(value, int) and value < (0 if key in LAYERS else 1)


def _check_model_type(transformers: Any, name: str, raw: dict[str, Any]) -> None:
    known = list(transformers.CONFIG_MAPPING.keys())
    kind = raw.get("model_type")
    if kind in known:
        return
    got = "none" if kind is None else repr(kind)
    near = get_close_matches(str(kind), known, 1)
    example = repr(near[0]) if near else "'llama' or 'gpt2'"
    raise _mistake(
        name,
        "model_type",
        f"expected a model type that transformers {transformers.__version__} has, as {example}, got {got}; correct it, "
        "or update transformers",
    )


def explain_key_error(transformers: Any, name: str, config: dict[str, Any], error: KeyError) -> Mistake | None:
    """Return the message for a name in a configuration that is not in a table of transformers; None if it is not one.

    Args:
        transformers: the package.
        name: the model's name, as the user gave it.
        config: as a dictionary.
        error: raised while the model was built.
    """
    unknown = error.args[0] if error.args else None
    if not isinstance(unknown, str):
        return None
    path = next((path for path, value in _values(config) if value == unknown), None)
    if path is None:
        return None
    expected = "a name that this model knows"
    if path.endswith("rope_type"):
        expected = f"one of {', '.join(['default', *transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS])}"
    elif unknown not in transformers.activations.ACT2FN and ("act" in path):
        near = get_close_matches(unknown, list(transformers.activations.ACT2FN), 3)
        expected = f"an activation of transformers, as {', '.join(near or ['gelu', 'silu', 'relu'])}"
    return _mistake(name, path, f"expected {expected}, got {unknown!r}; {REMEDY}")


def _mistake(name: str, path: str, problem: str) -> Mistake:
    return Mistake(f"{name}: config.json: {visible(path)}: {visible(problem)}")


def _values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each scalar of a JSON value, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _values(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, path) if isinstance(inner, dict) else ()
    else:
        yield path, value
