"""Models that a command can run: those shipped with headscope, and Hugging Face's from a folder or from the hub.

Of Hugging Face models, headscope reads safetensors and never pickles, and runs neither code of a repository nor
compiled kernels; a folder is read offline. ``model_config`` checks what a configuration requests.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headscope._support.text import visible
from headscope.cli._shared.config_values import REMEDY, explain_key_error
from headscope.cli._shared.console import few, one_line
from headscope.cli._shared.folder_checks import INDEX, SINGLE, check_dtypes, check_folder, check_places, unread_files
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_config import confined, read_config
from headscope.cli._shared.model_size import check_size, find_limit

if TYPE_CHECKING:
    from torch import Tensor, nn

SHIPPED = ("text", "digits")
MOST_SPECIAL = 1000  # tokens; above, a vocabulary has words
MOST_TOKENS = 32768  # default context, as current models allow 131072 and more
MOST_WRITTEN = 4096  # that of models that write their attention out, whose weights take T × T numbers for each head
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)
FEW_NAMED = 3  # names of missing or unused weights in a note


@dataclass(frozen=True)
class Loaded:
    """A model, and how to run it.

    Attributes:
        model: in eval mode, on the CPU.
        name: a description in a few words.
        takes: "text", or "image".
        context: the tokens of one forward pass by default.
        vocabulary: number of token ids.
        encode: returns the token ids of a text, without the ids of its ends; None without a tokenizer.
        ends: the ids that the tokenizer sets before and after a text.
        piece: returns the text of a token.
        run: a forward pass over tokens [1, T], or over images.
        paired: whether there are an encoder and a decoder; the decoder reads the same tokens shifted by one.
        key_heads: number of key/value heads, if the configuration has it.
        prepare: returns the input for the path of a picture.
        samples: returns the shipped pictures, the default input.
        notes: what the user has to know about the model.
        without_tokenizer: the reason why there is none.
        limit: the most tokens of one forward pass; None: as many as ``context``.
        tokenizer: the tokenizer itself, for offsets and chats; None without one.
    """

    model: nn.Module
    name: str
    takes: str
    context: int
    vocabulary: int
    encode: Callable[[str], list[int]] | None
    ends: tuple[list[int], list[int]]
    piece: Callable[[int], str] | None
    run: Callable[[Tensor], Any]
    paired: bool = False
    key_heads: int | None = None
    prepare: Callable[[str], Tensor] | None = None
    samples: Callable[[], Tensor] | None = None
    notes: tuple[str, ...] = ()
    without_tokenizer: str = ""
    limit: int | None = None
    tokenizer: Any = None


def load(name: str) -> Loaded:
    """Load the model of this name: "text", "digits", a folder, or a name on the hub.

    Raises:
        Mistake: it does not exist, or cannot be loaded.
    """
    if name == "text":
        return _text()
    if name == "digits":
        return _digits()
    if not name.strip():
        raise Mistake('MODEL: expected "text", "digits", a folder or a name on the hub, got an empty name')
    return _hugging_face(name)


def _text() -> Loaded:
    from headscope import load_example

    example = load_example("text")
    sizes, tokenizer = example.model.config, example.tokenizer
    return Loaded(
        example.model, "the shipped language model", "text", sizes.context, sizes.vocab_size, tokenizer.encode,
        ([], []), tokenizer.piece, example.model, tokenizer=tokenizer,
    )  # fmt: skip


def _digits() -> Loaded:
    from headscope import load_example

    example = load_example("digits")

    def prepare(path: str) -> Tensor:
        import torch

        from headscope.cli._shared.digits import read_picture

        return torch.from_numpy(read_picture(path).pixels).float()[None]

    def samples() -> Tensor:
        import torch

        return torch.stack([sample.image for sample in example.samples])

    return Loaded(
        example.model, "the shipped vision model", "image", 0, 0, None, ([], []), None, example.model,
        prepare=prepare, samples=samples,
    )  # fmt: skip


# ---------------------------------------------------------------- Hugging Face


def _hugging_face(name: str) -> Loaded:
    folder = os.path.isdir(name)  # False where Path.is_dir raises: a name can be too long
    if folder:
        check_folder(name)
    elif name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.exists(name):
        raise Mistake(f"{name}: is not a folder, expected the folder of a model or a name on the hub")
    try:
        import transformers
    except ImportError as error:
        if error.name != "transformers":  # it is there, and what it imports fails
            raise Mistake(f"{name}: transformers cannot be imported: {_first(error)}") from error
        raise Mistake(
            f"{name}: a model other than {' and '.join(SHIPPED)} needs transformers: pip install transformers"
        ) from error
    with quiet_transformers():
        return _loaded(transformers, name, folder)


def _loaded(transformers: Any, name: str, folder: bool) -> Loaded:
    """Load from the folder or the cache; if the cache does not have it, from the hub."""
    try:
        try:
            return _from(transformers, name, offline=True)
        except OSError:
            if folder:
                raise
            return _from(transformers, name, offline=False)
    except Mistake:
        raise
    except OSError as error:
        if folder:
            raise Mistake(f"{name}: cannot be loaded: {_first(error)}") from error
        raise Mistake(f"{name}: {_unavailable(name, error)}") from error
    except Exception as error:  # transformers raises many types for damaged folders and those of other versions
        if "trust_remote_code" in str(error):
            raise Mistake(
                f"{name}: requires Python code of its repository, which headscope does not run; load it yourself "
                "and use headscope.watch"
            ) from error
        raise Mistake(f"{name}: cannot be loaded: {type(error).__name__}: {_first(error)}") from error


def _unavailable(name: str, error: OSError) -> str:
    """Return why a name is neither a folder nor on the Hub, and the remedies."""
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE
    why = "HF_HUB_OFFLINE is set, and the model was not downloaded" if offline else _first(error).rstrip(".")
    download = f"unset HF_HUB_OFFLINE, or download the model first (hf download {name})"
    connect = f"check the name and the connection, or download the model first (hf download {name})"
    remedy = f"pass the path of a folder, {download if offline else connect}"
    return f"is neither a folder nor reachable on the Hub: {why}; {remedy}"


def _first(error: BaseException) -> str:
    """Return the first line of an error, with the next ones as long as a line ends in a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    last = next((at for at, line in enumerate(lines) if not line.rstrip().endswith(":")), len(lines) - 1)
    return one_line(" ".join(lines[: last + 1]))


def _from(transformers: Any, name: str, *, offline: bool) -> Loaded:
    with confined(name, offline=offline):
        return _confined(transformers, name, offline=offline)


def _confined(transformers: Any, name: str, *, offline: bool) -> Loaded:
    config, notes = read_config(transformers, name, offline=offline)
    options: dict[str, Any] = {"config": config, "local_files_only": offline, "trust_remote_code": False}
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        kind = transformers.AutoModel
    check_size(name, _folder(name), kind, config)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Casting complex values")  # `check_dtypes` refuses them
            model, report = kind.from_pretrained(
                name, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except KeyError as error:
        raise explain_key_error(transformers, name, config.to_dict(), error) or error from error
    _check_shapes(name, report["mismatched_keys"])
    weights = getattr(config, "transformers_weights", None)
    check_places(name, _folder(name), weights)
    check_dtypes(name, _folder(name), model, report["unexpected_keys"], weights)
    model.eval()
    problems = {
        "missing_keys": "weights missing from the files are random",
        "unexpected_keys": "weights in the files that this model does not have are ignored",
    }
    notes += [f"{what}: {few(sorted(report[keys]), FEW_NAMED)}" for keys, what in problems.items() if report[keys]]
    if unread := unread_files(name, _folder(name), weights):
        files = few([path.name for path in unread], FEW_NAMED)
        notes.append(f"{SINGLE} is read, and files of {INDEX} are not: {files}")
    label = f"{type(model).__name__} ({visible(name)})"
    loaded = _either(transformers, model, label, name, options)

    def run(inputs: Tensor) -> Any:
        with confined(name, offline=True):
            return loaded.run(inputs)

    return replace(loaded, notes=(*notes, *loaded.notes), run=run)


def _folder(name: str) -> Path:
    """Return the folder of a model; for a name on the hub it is in the cache."""
    from transformers.utils.hub import cached_file

    file = None if os.path.isdir(name) else cached_file(name, "config.json", local_files_only=True)
    return Path(name) if file is None else Path(file).parent


def _check_shapes(name: str, mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Check that every tensor of the files has the shape that the configuration requires.

    transformers would raise too, but names the tensors only in its log.

    Args:
        name: of the model.
        mismatched: name of each tensor, its shape in the files, and its shape in the model.

    Raises:
        Mistake: a tensor has another shape.
    """
    if not mismatched:
        return
    (tensor, stored, expected), *others = sorted(mismatched, key=lambda each: each[0])
    more = f"; {len(others)} more tensors do not match" if others else ""
    raise Mistake(
        f"{name}: cannot be loaded: {visible(tensor)}: expected shape {list(expected)}, as config.json describes the "
        f"model, got {list(stored)} in the files{more}; use the config.json that belongs to these weights"
    )


def _either(transformers: Any, model: Any, label: str, name: str, options: dict[str, Any]) -> Loaded:
    if model.main_input_name == "pixel_values":
        return _vision(model, label, name, offline=options["local_files_only"])
    if model.main_input_name != "input_ids":
        raise Mistake(f"{name}: takes {model.main_input_name}, expected a model of text or of images")
    return _language(transformers, model, label, name, options)


def _language(transformers: Any, model: Any, label: str, name: str, options: dict[str, Any]) -> Loaded:
    import torch

    with _tokenizer_errors(f"{name}: the tokenizer cannot be read"):
        tokenizer, reason = _tokenizer(transformers, name, options)
        ends = _ends(tokenizer)

    config = model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    paired = _is_paired(model, parameters, name)
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    # logits of the last row only; a number would make Gemma 4 skip the other rows in layers that share keys
    extra |= {"logits_to_keep": torch.tensor([-1])} if "logits_to_keep" in parameters else {}

    def run(ids: Tensor) -> Any:
        decoded = {"decoder_input_ids": _later(ids, model.config)} if paired else {}
        return model(input_ids=ids, **decoded, **extra)

    def encode(text: str) -> list[int]:
        # verbose=False: no warning of texts longer than the context, which are read in windows
        with _tokenizer_errors(
            f"{name}: {_tokenizer_file(tokenizer, name)}: cannot encode this text",
            "; correct the file, or use headscope watch --ids",
        ):
            return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def piece(token: int) -> str:
        with _tokenizer_errors(f"{name}: {_tokenizer_file(tokenizer, name)}: cannot decode token {token}"):
            return tokenizer.decode([token])

    limit = find_limit(model, config, tokenizer)
    is_fused = getattr(model.config, "_attn_implementation", None) not in (None, "eager")
    return Loaded(
        model, label, "text", min(limit, MOST_TOKENS if is_fused else MOST_WRITTEN),
        model.get_input_embeddings().num_embeddings, None if tokenizer is None else encode, ends,
        None if tokenizer is None else piece, run, paired, getattr(config, "num_key_value_heads", None),
        without_tokenizer=reason, limit=limit, tokenizer=tokenizer,
    )  # fmt: skip


def _is_paired(model: Any, parameters: Collection[str], name: str) -> bool:
    """Return whether a model has an encoder and a decoder.

    Raises:
        Mistake: its configuration claims both, but its class and its forward do not.
    """
    is_claimed = bool(model.config.is_encoder_decoder)
    if not is_claimed or "decoder_input_ids" in parameters:
        return is_claimed
    if getattr(type(model.config), "is_encoder_decoder", False):  # an encoder alone, with the configuration of both
        return False
    raise Mistake(
        f"{name}: config.json: is_encoder_decoder: expected false, as the forward of {type(model).__name__} has no "
        f"decoder_input_ids, got true; {REMEDY}"
    )


def _tokenizer(transformers: Any, name: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return the tokenizer of a model, or None and the reason: --ids works without one."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        if _has_words(tokenizer):
            return tokenizer, ""
        reason = "has no words"
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        reason = f"no {_first(error)}" if isinstance(error, KeyError) else _first(error)
    files = [file for file in TOKENIZER_FILES if os.path.isfile(os.path.join(name, file))]
    if not files and os.path.isdir(name):
        return None, "no tokenizer.json in the folder"
    return None, f"{', '.join(files)}: {reason}" if files else reason


def _has_words(tokenizer: Any) -> bool:
    """Return whether a tokenizer encodes text; transformers makes up an empty one for a folder without its files.

    The vocabulary of such a tokenizer has special tokens only, some with the mark of a space or a full stop: every word
    would be the unknown token.
    """
    if len(tokenizer) <= MOST_SPECIAL:
        special = set(tokenizer.all_special_ids)
        if sum(token not in special for token in tokenizer.get_vocab().values()) <= 1:
            return False
    return bool(tokenizer("a", add_special_tokens=False)["input_ids"])


def _tokenizer_file(tokenizer: Any, name: str) -> str:
    """Return the name of the file that a tokenizer was read from."""
    files = ["tokenizer.json", *tokenizer.vocab_files_names.values()]
    return next((file for file in files if os.path.isfile(os.path.join(name, file))), files[0])


@contextmanager
def _tokenizer_errors(problem: str, remedy: str = "") -> Generator[None]:
    """Turn any error of a tokenizer into a mistake; panics of its Rust code are not subclasses of Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise Mistake(f"{problem}: {_first(error)}{remedy}") from error


def _ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer sets before and after a text."""
    if tokenizer is None:
        return [], []
    bare, whole = (tokenizer("a", add_special_tokens=with_ends)["input_ids"] for with_ends in (False, True))
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return list(whole[:start]), list(whole[start + len(bare) :])
    return [], []


def _later(ids: Tensor, config: Any) -> Tensor:
    """Return the decoder's input: the same tokens shifted by one, after the start token."""
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        start = config.pad_token_id or 0
    shifted = ids.roll(1, -1)
    shifted[..., 0] = start
    return shifted


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Silence the log and the progress bars of transformers, if it is imported."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        yield
        return
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars = transformers.utils.logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()


# ---------------------------------------------------------------- images


def _vision(model: Any, label: str, name: str, *, offline: bool) -> Loaded:
    from headscope.cli._shared.image_processing import read_processing

    processing, notes = read_processing(name, model.config, offline=offline)

    def prepare(path: str) -> Tensor:
        import torch

        return torch.from_numpy(processing.read(path))[None]

    return Loaded(
        model, label, "image", 0, 0, None, ([], []), None, lambda images: model(pixel_values=images), prepare=prepare,
        notes=tuple(notes),
    )  # fmt: skip
