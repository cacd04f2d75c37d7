"""Configurations of transformers' models are untrusted: what they may request, and what headscope refuses.

A ``config.json`` can name compiled kernels, models in other repositories, Python code and pickles, and transformers
fetches and runs them. So headscope reads the file first, refuses unsupported requests, and removes names of kernels;
transformers gets the rest. It refuses Python code itself; ``model_loading.py`` turns its error into a message.
``confined`` blocks what a model's own code would load.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headscope._support.files import is_inside
from headscope._support.text import visible
from headscope.cli._shared.config_values import check_default_layers, check_values, normalize_dtypes
from headscope.cli._shared.folder_checks import check_indexes, check_kind, with_metadata
from headscope.cli._shared.mistakes import Mistake

ATTENTION = ("eager", "sdpa")
EXPERTS = ("eager", "grouped_mm", "batched_mm")
# the keys that name a function, and the functions that transformers itself holds
IMPLEMENTATIONS = {
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
    "_attn_implementation_internal": (),
    "experts_implementation": EXPERTS,
    "_experts_implementation": EXPERTS,
    "_experts_implementation_internal": (),
}
TIMM_FILES = {"cache_dir", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"}


def read_config(transformers: Any, name: str, *, offline: bool) -> tuple[Any, list[str]]:
    """Read the configuration of a folder or of a name on the hub, and remove what it may not request.

    Returns:
        the configuration, as ``AutoConfig`` builds it; a note for each implementation that it names and is not used.

    Raises:
        Mistake: it requests something that headscope does not support.
        OSError: it does not exist.
    """
    try:
        raw, _ = transformers.PreTrainedConfig.get_config_dict(name, local_files_only=offline)
    except (TypeError, AttributeError):  # transformers uses what it has read as an object
        check_is_object(name, offline=offline)
        raise
    if not isinstance(raw, dict):
        check_is_object(name, offline=offline)
    check_no_adapter(name, offline=offline)
    check_config(name, raw)
    check_indexes(name, raw.get("transformers_weights"))
    check_values(transformers, name, raw)
    raw.pop("configuration_files", None)  # `get_config_dict` has chosen one of these
    notes = remove_implementations(raw)
    _normalize(raw)
    with TemporaryDirectory() as folder:  # so that transformers reads exactly what was checked
        Path(folder, "config.json").write_text(json.dumps(raw), encoding="utf-8")
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(str(error).replace(folder, name)) from error
    check_default_layers(name, config)
    config.name_or_path = name
    return config, notes


def check_is_object(name: str, *, offline: bool) -> None:
    """Check that config.json holds a JSON object."""
    from transformers.utils.hub import cached_file

    file = cached_file(name, "config.json", local_files_only=offline)
    config = None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    check_kind(config, f"{name}: config.json: expected a JSON object")


def check_no_adapter(name: str, *, offline: bool) -> None:
    """Check that the weights are not an adapter of a base model.

    Without peft transformers ignores them; with peft it fetches the base model that they name.
    """
    from transformers.utils.peft_utils import find_adapter_config_file

    if find_adapter_config_file(name, local_files_only=offline) is not None:
        raise Mistake(
            f"{name}: adapter_config.json: is of a PEFT adapter, which is not applied; expected a whole model: call "
            "merge_and_unload() and save_pretrained()"
        )


def check_config(name: str, raw: dict[str, Any]) -> None:
    """Check that a configuration requests only a model of transformers with weights from safetensors."""
    for each in _dicts(raw):
        if each.get("quantization_config"):
            problem = "quantized weights need compiled kernels; expected float weights: dequantize and save the model"
            raise _refusal(name, f"quantization_config: {problem}")
        weights = each.get("transformers_weights")
        if weights is not None and not _is_weights_file(weights):
            raise _refusal(
                name, f"transformers_weights: expected a .safetensors file in the folder of the model, got {weights}"
            )
        _check_backbone(name, each)


def _check_backbone(name: str, config: dict[str, Any]) -> None:
    """Check that a part of a model is described by the configuration and not by the name of another model."""
    timm = config.get("model_type") in ("timm_backbone", "timm_wrapper")
    for key in ("architecture", "backbone"):
        other = config.get(key)
        if not isinstance(other, str):
            continue
        if timm and ("/" in other or ":" in other):
            raise _refusal(name, f"{key}: names the model {other}, which timm fetches; expected a model of timm itself")
        if not timm and key == "backbone" and not config.get("backbone_config"):
            raise _refusal(
                name,
                f"{key}: names the model {other}, which transformers looks up on the hub; expected backbone_config",
            )
    options = config.get("model_args")
    if timm and isinstance(options, dict) and (files := sorted(TIMM_FILES.intersection(options))):
        raise _refusal(name, f"model_args: {files[0]} makes timm read other weights; expected none")


def _is_weights_file(file: object) -> bool:
    return isinstance(file, str) and file.endswith((".safetensors", ".safetensors.index.json")) and is_inside(file)


def _refusal(name: str, problem: str) -> Mistake:
    return Mistake(f"{name}: config.json: {visible(problem)}")


def remove_implementations(raw: dict[str, Any]) -> list[str]:
    """Remove the names of functions that are not transformers' own, at every depth; return a note for each."""
    notes: dict[str, None] = {}
    for each in _dicts(raw):
        for key, own in IMPLEMENTATIONS.items():
            if key not in each:
                continue
            value = each[key]
            by_part = value if isinstance(value, dict) else {"": value}
            unknown = {part: one for part, one in by_part.items() if one is not None and one not in own}
            for one in unknown.values():
                shown = visible(one) if isinstance(one, str) else json.dumps(one)
                notes[f'config.json: {key} is "{shown}", which is not used'] = None
            known = {part: one for part, one in by_part.items() if part not in unknown}
            each[key] = known if isinstance(value, dict) else known.get("")
    return list(notes)


def _normalize(raw: dict[str, Any]) -> None:
    """Make outputs objects rather than tuples, and write dtypes as transformers reads them, at every depth."""
    for each in _dicts(raw):
        if "return_dict" in each:
            each["return_dict"] = True
    normalize_dtypes(raw)


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a JSON value and everything in it, the objects alone."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _dicts(each)


@contextmanager
def confined(name: str, *, offline: bool) -> Generator[None]:
    """Block compiled kernels, pickles and conversions by others in transformers; offline, the hub as well.

    Some models load kernels by themselves (RWKV, MRA), and an index of weights can name a pickle.
    """
    import huggingface_hub.constants
    import torch

    kernels = import_module("transformers.integrations.hub_kernels")
    loading = import_module("transformers.modeling_utils")

    def refuse(file: Any, *_: object, **__: object) -> None:
        what = visible(Path(file).name) if isinstance(file, (str, os.PathLike)) else "a file"
        raise Mistake(f"{name}: {what} is a pickle, which can run code when it is read; expected .safetensors")

    def absent(*_: object, **__: object) -> bool:
        return False

    with ExitStack() as stack:
        for place, attribute, value in (
            (torch, "load", refuse),
            (kernels, "is_kernels_available", absent),
            (loading, "get_checkpoint_shard_files", with_metadata(loading.get_checkpoint_shard_files)),
            (huggingface_hub.constants, "HF_HUB_OFFLINE", offline or huggingface_hub.constants.HF_HUB_OFFLINE),
        ):
            stack.callback(setattr, place, attribute, getattr(place, attribute))
            setattr(place, attribute, value)
        stack.enter_context(_environment("DISABLE_SAFETENSORS_CONVERSION", "1"))
        yield


@contextmanager
def _environment(variable: str, value: str) -> Generator[None]:
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
