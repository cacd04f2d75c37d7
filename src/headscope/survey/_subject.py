"""The model of a survey: how to run it, how to encode text for it, and its digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from headscope._support.hashing import bytes_of
from headscope.examples import TextExample, load_example
from headscope.survey._corpus import SurveyError

MOST_CONTEXT = 2048
"""The tokens of a window by default, if the model allows more."""

_PROBE = "The quick brown fox (jumps) over 13 lazy dogs.\n\tÄöü — 你好 🦊 def f(x):\n        return x\n"


@dataclass(frozen=True)
class Subject:
    """A model that reads tokens, and how to run it.

    Attributes:
        model: in eval mode.
        name: a description in a few words.
        run: a forward pass over tokens [B, T].
        encode: returns the token ids of a text, without those of its ends; None without a tokenizer.
        ends: the ids that the tokenizer sets before and after a text.
        context: the most tokens of one forward pass; None: unknown.
        vocabulary: the number of token ids; None: unknown.
        tokenizer: the tokenizer itself, for its digest.
        paired: whether there are an encoder and a decoder, which read different ids.
    """

    model: nn.Module
    name: str
    run: Callable[[Tensor], Any]
    encode: Callable[[str], list[int]] | None = None
    ends: tuple[list[int], list[int]] = ([], [])
    context: int | None = None
    vocabulary: int | None = None
    tokenizer: Any = None
    paired: bool = False

    @property
    def device(self) -> torch.device:
        """That of its first parameter."""
        return next((each.device for each in self.model.parameters()), torch.device("cpu"))


def as_subject(model: Any, tokenizer: Any) -> Subject:
    """Return the model of the arguments ``model`` and ``tokenizer``.

    Raises:
        TypeError: the model is of another kind.
    """
    if isinstance(model, Subject):
        return model
    if model == "text":
        model = load_example("text")
    if isinstance(model, TextExample):
        sizes = model.model.config
        return Subject(
            model.model, "the shipped language model", model.model, model.tokenizer.encode, ([], []), sizes.context,
            sizes.vocab_size, model.tokenizer,
        )  # fmt: skip
    if not isinstance(model, nn.Module):
        raise TypeError(f'model: got {type(model).__name__}, expected a torch.nn.Module, a TextExample or "text"')
    find = getattr(model, "get_input_embeddings", None)
    embeddings = find() if callable(find) else None
    return Subject(
        model, type(model).__name__, model, _encoder(tokenizer), _ends(tokenizer), _context_of(model),
        getattr(embeddings, "num_embeddings", None), tokenizer,
    )  # fmt: skip


def _context_of(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "context"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """Return a function that encodes text without the tokens of its ends."""
    if tokenizer is None:
        return None
    if hasattr(tokenizer, "all_special_ids"):  # of transformers

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

        return encode

    def encode_plainly(text: str) -> list[int]:
        encoded = tokenizer.encode(text)
        return list(getattr(encoded, "ids", encoded))

    return encode_plainly


def _ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer of transformers sets before and after a text."""
    if not hasattr(tokenizer, "all_special_ids"):
        return [], []
    bare, whole = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def digest_of_model(subject: Subject) -> str:
    """Return a digest of the parameters and buffers of a model, and of its configuration."""
    digest = hashlib.sha256(type(subject.model).__qualname__.encode())
    digest.update(json.dumps(_config_of(subject.model), sort_keys=True, default=str).encode())
    for name, x in sorted(subject.model.state_dict().items()):
        if not isinstance(x, Tensor):
            continue
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(bytes_of(x.cpu()))
    return digest.hexdigest()


def _config_of(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is None:
        return {}
    convert = getattr(config, "to_dict", None)
    entries = cast("dict[str, Any]", convert() if callable(convert) else vars(config))
    left_out = ("_name_or_path", "transformers_version")  # where it is, and who wrote it
    return {name: value for name, value in entries.items() if name not in left_out}


def digest_of_tokenizer(subject: Subject) -> str:
    """Return a digest of the tokenizer, and of what it does with a text that has many kinds of characters."""
    if subject.encode is None:
        return "none"
    digest = hashlib.sha256()
    for inner in (getattr(subject.tokenizer, name, None) for name in ("backend_tokenizer", "_tokenizer")):
        if hasattr(inner, "to_str"):
            digest.update(cast("Any", inner).to_str().encode())
            break
    try:
        digest.update(json.dumps([list(subject.encode(_PROBE)), *map(list, subject.ends)]).encode())
    except Exception as error:  # tokenizers raise errors of many types
        raise SurveyError(f"tokenizer: cannot encode a text: {type(error).__name__}: {error}") from error
    return digest.hexdigest()
