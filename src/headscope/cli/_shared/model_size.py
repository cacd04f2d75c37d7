"""The size of a configuration's model, checked before transformers builds it in memory."""

from __future__ import annotations

import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

from headscope._support.text import visible
from headscope.cli._shared.config_values import REMEDY
from headscope.cli._shared.folder_checks import weight_files
from headscope.cli._shared.mistakes import Mistake

MOST_GROWTH = 4  # float32 in memory is twice float16 in files, and some parameters are initialised
ALWAYS_FINE = 1 << 30  # bytes

NO_LIMIT = 1 << 30
"""In place of the most tokens of a model that states none."""


def check_size(name: str, folder: Path, kind: Any, config: Any) -> None:
    """Check that a model is not much larger than its weights: transformers initialises missing parameters at random.

    Args:
        name: of the model.
        folder: of its files.
        kind: the class of transformers that builds it from the configuration.
        config: of transformers.

    Raises:
        Mistake: it is much larger.
    """
    files = weight_files(name, folder, getattr(config, "transformers_weights", None))
    if not files or not all(file.is_file() for file in files):
        return
    model = _without_memory(kind, config)
    if model is None:
        return
    weights = sum(file.stat().st_size for file in files)
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    if parameters > MOST_GROWTH * weights + ALWAYS_FINE:
        raise Mistake(
            f"{name}: config.json: expected a model of the size of the weights ({_megabytes(weights)}), got "
            f"{visible(type(model).__name__)} ({_megabytes(parameters)} in float32), most of which would be "
            f"random; {REMEDY}"
        )


def _without_memory(kind: Any, config: Any) -> Any:
    """Return the model on the meta device; None if it cannot be built there."""
    import torch

    options: dict[str, Any] = {}
    if hasattr(kind, "from_config"):  # AutoModel, which chooses the class
        kind, options = kind.from_config, {"trust_remote_code": False}
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # the same warnings come when the model is built
            return kind(deepcopy(config), **options)
    except Exception:  # transformers raises again when it builds the model, with a better message
        return None


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e6:.2g} MB"


def find_limit(model: Any, config: Any, tokenizer: Any) -> int:
    """Return the most tokens that the model and its tokenizer allow."""
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
    limits = [getattr(config, name, None) for name in names]
    limits += [None if tokenizer is None else tokenizer.model_max_length]
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    for table in tables:  # RoBERTa and its family count positions from padding_idx + 1
        if getattr(table, "padding_idx", None) is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    return int(min([NO_LIMIT, *(n for n in limits if isinstance(n, (int, float)) and n > 0)]))
