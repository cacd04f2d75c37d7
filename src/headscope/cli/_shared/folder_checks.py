"""Checks of the files of a model's folder, before transformers opens them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headscope._support.files import is_inside
from headscope._support.text import visible
from headscope.cli._shared.mistakes import Mistake

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers reads the first that is there
FLOATS = {"F64", "F32", "F16", "BF16"}  # dtypes as safetensors spells them
OTHERS = {
    **{f"{kind}{bits}": f"{word}{bits}" for kind, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    "BOOL": "bool", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
WEIGHTS = (".safetensors", ".safetensors.index.json")


def check_folder(name: str) -> None:
    """Check that a folder holds a model, in regular files, with weights that need no unpickling.

    Raises:
        Mistake: it does not.
    """
    check_permission(name, os.R_OK | os.X_OK)
    paths = sorted(path for path in Path(name).iterdir() if os.path.exists(path))  # without dangling links
    files = {path.name for path in paths}
    if "config.json" not in files:
        raise Mistake(f"{name}: has no config.json, expected a folder written by save_pretrained of transformers")
    if not any(file.endswith(".safetensors") for file in files):
        pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt")))
        has = f"; {pickles[0]} is a pickle, which can run code when it is read" if pickles else ""
        raise Mistake(f"{name}: has no weights in .safetensors{has}")
    for path in paths:
        if path.name == "config.json" or path.name.endswith(WEIGHTS):
            check_is_regular(name, path)
            check_permission(str(path), os.R_OK)
    _check_generation(name)


def check_permission(name: str, mode: int) -> None:
    """Check that a file or folder may be read.

    Raises:
        Mistake: it may not.
    """
    if not os.access(name, mode):
        raise Mistake(f"{name}: permission denied, expected a {'folder' if os.path.isdir(name) else 'file'} to read")


def _check_generation(name: str) -> None:
    """Check that generation_config.json holds an object; transformers ignores one that is not JSON."""
    try:
        path = Path(name, "generation_config.json")
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, OSError, RecursionError):
        return
    check_kind(read, f"{name}: generation_config.json: expected a JSON object")


def check_is_regular(name: str, path: Path) -> None:
    """Check that a path of a folder does not lead to a pipe, a device or a directory: opening a pipe does not return.

    Raises:
        Mistake: it leads to one.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # Path.exists raises where a name is too long
        kind = "a directory" if os.path.isdir(path) else "a pipe, a socket or a device"
        raise Mistake(f"{name}: {visible(str(path.relative_to(name)))}: expected a regular file, got {kind}")


def check_indexes(name: str, weights: str | None = None) -> None:
    """Check that each index of weights names regular files in its folder.

    Args:
        name: of the model: a folder, or a name on the hub, which is not checked.
        weights: the file of weights that config.json names, if it names one.

    Raises:
        Mistake: an index names another file.
    """
    folder = Path(name)
    if not os.path.isdir(name):
        return
    named = {folder / weights} if weights is not None and weights.endswith(".json") else set[Path]()
    for path in sorted({*folder.glob("*.safetensors.index.json"), *named}):
        for file in _shards(name, path):
            if not is_inside(file):
                shown = visible(file)
                raise Mistake(f"{name}: {path.name}: weight_map: expected a file in the same folder, got '{shown}'")
            check_is_regular(name, folder / file)


def _shards(name: str, index: Path) -> list[str]:
    """Return the files that an index of weights names.

    Raises:
        Mistake: it is not an index.
    """
    if not os.path.isfile(index):
        return []
    try:
        read: Any = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{name}: {index.name}: expected a JSON object, got text that is not valid JSON") from error
    check_kind(read, f"{name}: {index.name}: expected a JSON object")
    if read.get("metadata") is not None:
        check_kind(read["metadata"], f"{name}: {index.name}: metadata: expected a JSON object")
    check_kind(read.get("weight_map"), f"{name}: {index.name}: weight_map: expected a JSON object")
    if not read["weight_map"]:
        raise Mistake(f"{name}: {index.name}: weight_map: expected the file of each tensor, got an empty object")
    for file in read["weight_map"].values():
        if not isinstance(file, str) or not Path(file).name:
            got = f"'{file}'" if isinstance(file, str) else json_kind(file)
            raise Mistake(f"{name}: {index.name}: weight_map: expected the name of a file, got {got}")
    return sorted(set(read["weight_map"].values()))


def check_kind(value: Any, problem: str) -> None:
    """Check that a JSON value is an object."""
    if not isinstance(value, dict):
        raise Mistake(f"{problem}, got {json_kind(value)}")


def json_kind(value: Any) -> str:
    """Return the kind of a JSON value, in words."""
    kinds = (
        (dict, "an object"),
        (list, "a list"),
        (str, "a string"),
        (bool, "true or false"),
        ((int, float), "a number"),
    )
    return next((words for types, words in kinds if isinstance(value, types)), "null")


def weight_files(name: str, folder: Path, weights: str | None = None) -> list[Path]:
    """Return the files that transformers reads the weights of a folder from.

    Args:
        name: of the model.
        folder: of its files.
        weights: the file of weights that config.json names, if it names one.
    """
    first = weights or next((file for file in (SINGLE, INDEX) if os.path.isfile(folder / file)), None)
    if first is None:
        return []
    files = _shards(name, folder / first) if first.endswith(".json") else [first]
    return list(dict.fromkeys(folder / file for file in files))  # "./a" is "a"


def unread_files(name: str, folder: Path, weights: str | None = None) -> list[Path]:
    """Return the files of an index that transformers does not read because it reads ``model.safetensors``.

    Args:
        name: of the model.
        folder: of its files.
        weights: the file of weights that config.json names, if it names one.
    """
    read = weight_files(name, folder, weights)
    if weights is not None or read != [folder / SINGLE]:
        return []
    files = dict.fromkeys(folder / file for file in _shards(name, folder / INDEX))
    return [file for file in files if file not in read and os.path.isfile(file)]


def count_tensors(name: str, weights: str | None = None) -> int | None:
    """Return the number of tensors in the files of weights; None if it is unknown.

    Args:
        name: of the model.
        weights: the file of weights that config.json names, if it names one.

    Raises:
        Mistake: one of the files is not a regular file.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(name)
    files = weight_files(name, folder, weights) if os.path.isdir(name) else []
    count = 0
    for path in files:
        check_is_regular(name, path)
        try:
            with safe_open(path, framework="pt") as file:
                count += len(list(file.keys()))
        except (SafetensorError, OSError, ValueError):  # transformers' message names the file
            return None
    return count if files else None


def with_metadata(read_index: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' reader of an index so that it accepts one without metadata.

    Args:
        read_index: ``get_checkpoint_shard_files``.
    """

    def read(folder: str, index: str, *arguments: Any, **options: Any) -> Any:
        content: Any = json.loads(Path(index).read_text(encoding="utf-8")) if os.path.isfile(index) else None
        if not isinstance(content, dict) or content.get("metadata") is not None:
            return read_index(folder, index, *arguments, **options)
        with TemporaryDirectory() as copies:
            copy = Path(copies, INDEX)
            copy.write_text(json.dumps({**content, "metadata": {}}), encoding="utf-8")
            return read_index(folder, str(copy), *arguments, **options)

    return read


def check_places(name: str, folder: Path, weights: str | None) -> None:
    """Check that no tensor is in two files of weights: transformers would take the one that it reads last.

    If there is a ``model.safetensors``, it does not read the files of an index.

    Args:
        name: of the model.
        folder: of its files.
        weights: the file of weights that config.json names, if it names one.

    Raises:
        Mistake: a tensor is in two.
    """
    from safetensors import SafetensorError, safe_open

    places: dict[str, str] = {}
    unread = unread_files(name, folder, weights)
    for path in [*weight_files(name, folder, weights), *unread]:
        try:
            with safe_open(path, framework="pt") as file:
                keys = sorted(file.keys())
        except SafetensorError:
            if path in unread:
                continue
            raise
        for key in keys:
            if key in places:
                raise Mistake(
                    f"{name}: {visible(key)}: expected in one file of weights, got {visible(places[key])} and "
                    f"{visible(path.relative_to(folder).as_posix())}; remove one of the two, or save the model again"
                )
            places[key] = path.relative_to(folder).as_posix()


def check_dtypes(name: str, folder: Path, model: Any, left_out: Collection[str], weights: str | None) -> None:
    """Check that the files hold floats for every parameter of a model that holds floats.

    transformers would cast: it drops an imaginary part, and reads quantized integers without their scale. Integers that
    belong to no parameter are buffers, as the masks in old files of GPT-2.

    Args:
        name: of the model.
        folder: of its files.
        model: as transformers has read it.
        left_out: the tensors of the files that it has no place for.
        weights: the file of weights that config.json names, if it names one.

    Raises:
        Mistake: a tensor has another dtype.
    """
    from safetensors import safe_open

    parameters = [parameter for parameter, tensor in model.named_parameters() if tensor.is_floating_point()]
    for path in weight_files(name, folder, weights):
        with safe_open(path, framework="pt") as file:
            dtypes = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - not a dictionary
        for key, dtype in sorted(dtypes.items()):
            if dtype in FLOATS or key in left_out:
                continue
            if not dtype.startswith("C") and not any(_is_same(key, each) for each in parameters):
                continue
            raise Mistake(
                f"{name}: {path.name}: {visible(key)}: expected dtype float32, float16, bfloat16 or float64, got "
                f"{OTHERS.get(dtype, dtype)}; convert the tensor, or dequantize the model, and save it"
            )


def _is_same(key: str, parameter: str) -> bool:
    """Return whether a tensor is a parameter: their names can differ in the prefix of the base model."""
    return f".{key}".endswith(f".{parameter}") or f".{parameter}".endswith(f".{key}")
