"""The header of a file of statistics: JSON whose values are checked as they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headscope._support.files import describe_obstacle
from headscope.stats._kept_weights import DamagedFileError
from headscope.stats._tensor_reader import LONGEST_HEADER, ChangedFileError, NoTensorsError, TensorBytes, TensorFile

STATISTICS = "headscope.stats"
RECORDING = "headscope.recording"
HISTORY = "headscope.history"
ORIGIN = "headscope.origin"
CHECKSUMS = "headscope.checksums"
_MOST_SHOWN = 300  # characters of a damaged value: a name may be as long as the file


def check_format(path: Path, header: Mapping[str, Any], most: int) -> None:
    """Check the version that a header states.

    Raises:
        ValueError: it is newer than ``most``, or missing.
    """
    with damage_named(path):
        version = read_whole(header, "version", 1)
    if version > most:
        raise ValueError(f"{path}: format {version}, this version of headscope reads up to {most}")


def read_header(path: Path, key: str = STATISTICS) -> dict[str, Any] | None:
    """Return the entry of a file's header under a key; None for any other file.

    Raises:
        ValueError: the entry is damaged.
    """
    try:
        file = TensorFile(path)
    except (NoTensorsError, OSError):
        return None
    return parse_entry(file, key)


def open_entry(path: Path, key: str) -> tuple[TensorFile | None, dict[str, Any] | None]:
    """Return a file and the entry of its header under a key; None for both if it is no safetensors file.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: it cannot be opened.
        ValueError: it is not a regular file, its name is not UTF-8, or as ``read_header``.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if (why := describe_obstacle(path)) is not None:
        raise ValueError(f"{path}: {why}")
    check_utf8(path)
    try:
        file = TensorFile(path)
        return file, parse_entry(file, key)
    except NoTensorsError:
        return None, None


def open_bytes(name: str, content: bytes) -> TensorFile:
    """Return the bytes of a file as an opened file; ``name``: what errors call it.

    Raises:
        ValueError: they are not those of a safetensors file.
    """
    try:
        return TensorBytes(name, content)
    except NoTensorsError as error:
        raise ValueError(f"{name}: is damaged: it {error}") from error


def parse_entry(file: TensorFile, key: str) -> dict[str, Any] | None:
    """Return the entry of an opened file's header under a key; None if it has none; raise as ``read_header``."""
    if key not in file.metadata:
        return None
    with damage_named(file.path):
        return {**json.loads(file.metadata[key])}


def in_order(content: bytes) -> bytes:
    """Return the bytes of a safetensors file with its entries by name: safetensors writes them in a random order."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    head = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # tensors begin at a multiple of 8 bytes
    return len(head).to_bytes(8, "little") + head + content[start:]


def is_cut_short(path: Path, key: str = STATISTICS) -> bool:
    """Return whether a file has a header with this entry, or its start, and ends before its tensors do."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            head = file.read(min(length, size)) if length <= LONGEST_HEADER else b""
        if f'"{key}"'.encode() not in head:
            return False
        if len(head) < length:
            return True
        tensors = (entry for name, entry in json.loads(head).items() if name != "__metadata__")
        return size < 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False  # damaged in another way


def is_statistics(path: Path) -> bool:
    """Return whether a file holds readable statistics of headscope, and so may be replaced."""
    try:
        return path.is_file() and read_header(path) is not None  # opening a pipe would wait
    except ValueError:
        return False


def check_utf8(path: Path) -> None:
    """Check that a file of this name can be read back.

    Raises:
        ValueError: the name is not UTF-8.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{str(path)!a}: is not UTF-8, and safetensors does not open files with such names") from error


@contextmanager
def damage_named(path: Path) -> Generator[None]:
    """Raise every error within the block as a ``ValueError`` that names the file and the damage."""
    try:
        yield
    except (ChangedFileError, DamagedFileError):
        raise  # names the file
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is damaged: its header is not JSON ({error})") from error
    except KeyError as error:
        raise ValueError(f"{path}: is damaged: it lacks {_short(error)}") from error
    except (TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged: {_short(error)}") from error


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def read_value(header: Mapping[str, Any], name: str, *kinds: type[Any]) -> Any:
    """Return a value of a header.

    Raises:
        KeyError: it is missing.
        TypeError: the value is of another kind; True and False are not whole numbers.
    """
    value = header[name]
    if type(value) not in kinds:
        expected = " or ".join(each.__name__ for each in kinds)
        raise TypeError(f"{name}: got {type(value).__name__}, expected {expected}")
    return value


def read_list(header: Mapping[str, Any], name: str, kind: type[Any]) -> list[Any]:
    """Return a list of values of one kind; raise as ``read_value``."""
    return [read_value({name: each}, name, kind) for each in read_value(header, name, list)]


def read_whole(header: Mapping[str, Any], name: str, least: int, most: float = 2**62) -> int:
    """Return a whole number of a header, by default one that 64 bits hold.

    Raises:
        KeyError, TypeError: as ``read_value``.
        ValueError: it is out of range.
    """
    value = read_value(header, name, int)
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value}, expected {least} to {most}")
    return value


def read_wholes(header: Mapping[str, Any], name: str, most: int = 2**62) -> tuple[int, ...]:
    """Return a list of whole numbers from 0; raise as ``read_whole``."""
    return tuple(read_whole({name: each}, name, 0, most) for each in read_value(header, name, list))
