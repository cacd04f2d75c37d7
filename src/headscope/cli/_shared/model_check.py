"""``headscope check --model``: the model of a folder, and inputs for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import console, print_json, say
from headscope.cli._shared.mistakes import Mistake, name_options

if TYPE_CHECKING:
    from headscope.cli._shared.model_loading import Loaded

PROBLEMS = 1  # exit code
TOKENS = 23  # of the text that the model reads; prime, so that an axis is not another one by chance
MOST_IDS = 50_000  # later ones are rarely ordinary text
OPTIONS = ("causal", "length", "reproducible", "strict", "json")
"""The options that go with a model; the others describe an attention module, or a folder of them."""


def check_folder_model(folder: str, targets: Sequence[str], options: Mapping[str, Any]) -> int:
    """Check the model of a folder, print the findings, and return the exit code.

    Args:
        folder: the folder.
        targets: files that were given as well, which is a mistake.
        options: of the command; None, False or () = not given.

    Raises:
        Mistake: an option does not go with a model, or the model cannot be loaded or run.
    """
    _refuse_other_options(targets, options)
    with progress_line("loading torch"):
        import_module("torch")
    from headscope.checking import CheckError, check_model
    from headscope.cli._shared.model_loading import load, quiet_transformers

    with progress_line(f"loading {folder}"):
        loaded = load(folder)
    for note in loaded.notes:
        say(f"headscope check: {note}")
    inputs = build_inputs(loaded)
    names = ("causal", "length", "reproducible")
    chosen = {name: options[name] for name in names if options.get(name) is not None}
    try:
        with progress_line("checking"), quiet_transformers():
            findings = check_model(loaded.model, inputs, **chosen)
    except CheckError as error:
        raise Mistake(name_options(f"{visible(folder)}: {error}", {"causal": "--causal"})) from error
    findings = replace(findings, strict=bool(options["strict"]))
    if options["json"]:
        print_json(findings.to_dict())
    else:
        console().print(findings.table())
    return PROBLEMS if findings else 0


def _refuse_other_options(targets: Sequence[str], options: Mapping[str, Any]) -> None:
    if targets:
        raise Mistake(f"--model: got {visible(targets[0])}, too, expected either files or --model DIR")
    for name, value in options.items():
        if name not in OPTIONS and value is not None and value is not False and value != ():
            option = "--class" if name == "class_" else f"--{name.replace('_', '-')}"
            raise Mistake(f"{option}: describes attention modules, and does not go with --model")


def build_inputs(loaded: Loaded) -> Any:
    """Return inputs for a model: random tokens, the same in each run, or pictures."""
    import torch

    name = getattr(loaded.model, "main_input_name", None)  # of models of transformers
    random = torch.Generator().manual_seed(0)
    config: Any = getattr(loaded.model, "config", None)
    if loaded.takes == "image":
        if loaded.samples is not None:
            return loaded.samples()[:2]
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {name: torch.randn(2, getattr(config, "num_channels", 3), height, width, generator=random)}
    special = _list_special(config)
    allowed = torch.tensor([token for token in range(min(loaded.vocabulary, MOST_IDS)) if token not in special])
    ids = allowed[torch.randint(0, len(allowed), (2, min(TOKENS, loaded.context)), generator=random)]
    return ids if name is None else {name: ids, "attention_mask": torch.ones_like(ids)}


def _list_special(config: Any) -> set[int]:
    """Return the ids that have a meaning of their own, such as those of padding and of images."""
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    special: set[int] = set()
    for name, value in values.items():
        if name.endswith(("token_id", "token_index")):
            special |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    return special
