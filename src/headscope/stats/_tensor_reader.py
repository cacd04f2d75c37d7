"""A safetensors file, read in plain reads without memory mapping; reading raises once it has changed.

A mapped file shows later writes, and kills the process with SIGBUS if it is truncated. Here every read opens the file
again, and compares it with the file that was opened first.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO, FileIO
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.stats._kept_weights import DamagedFileError, NoWeightsError

LONGEST_HEADER = 100_000_000  # bytes, by safetensors
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""The dtypes that headscope writes and reads, by their safetensors names."""
_STEP = 2**20  # bytes that are checked at a time

Bounds = tuple[int, int]
Index = int | slice


class ChangedFileError(NoWeightsError):
    """A file differs from the one that was loaded."""


class NoTensorsError(ValueError):
    """A file is not a safetensors file; the message states why."""


@dataclass(frozen=True)
class _Identity:
    """The identity of a file: it differs for another file in its place, and after a write.

    Attributes:
        ctime_ns: differs also after a change of its name or mode, and cannot be reset as the modification time can.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(file: FileIO) -> _Identity:
        status = os.fstat(file.fileno())
        return _Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: its dtype, by the name of safetensors.
        shape: its shape.
        start, stop: its bytes, counted from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """A safetensors file.

    Attributes:
        path: as passed by the caller.
        metadata: the entries of its header that are not tensors.
        entries: its tensors by name.
        checksums: of the bytes of each tensor, checked on reading; empty: nothing is checked.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            OSError: the file cannot be opened.
            NoTensorsError: it is not a safetensors file.
        """
        self.path = path
        self._absolute = Path(os.path.abspath(path))  # a later read may run in another folder
        with self._absolute.open("rb", buffering=0) as file:
            self._identity = _Identity.of(file)
            self._read_header(file, self._identity.size)

    def _read_header(self, file: FileIO | BytesIO, size: int) -> None:
        """Read the header of so many bytes; raise NoTensorsError if it is not that of a safetensors file."""
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > LONGEST_HEADER:
            raise NoTensorsError("does not have a safetensors header")
        self._begin = 8 + length
        self.metadata, self.entries = _parse_header(file.read(length), length)
        _check_places(self.entries.values(), size - self._begin)
        self.checksums: Mapping[str, int] = {}
        self._parts: set[str] = set()  # tensors of which pieces are read
        self._unchecked: set[str] = set()

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors by name.

        Raises:
            ChangedFileError: the file has changed since its header was read.
            DamagedFileError: a tensor has another checksum.
        """
        with self._open() as file:
            return {name: self._tensor(file, name, tuple((0, n) for n in self.entries[name].shape)) for name in names}

    def part(self, name: str) -> TensorPart:
        """Return a tensor that reads only the indexed pieces later.

        The checksums of all such tensors are checked before the first piece of any is read.
        """
        self._parts.add(name)
        self._unchecked.add(name)
        return TensorPart(self, name)

    def read_piece(self, name: str, bounds: tuple[Bounds, ...]) -> Tensor:
        """Return the piece of a tensor within these bounds of its axes; raise as ``read``."""
        with self._open() as file:
            if self.checksums and self._unchecked and bounds != tuple((0, n) for n in self.entries[name].shape):
                self._check_parts(file)
            return self._tensor(file, name, bounds)

    @contextmanager
    def _open(self) -> Generator[FileIO | BytesIO]:
        """Open the file; raise if it changed before or during reading."""
        try:
            with self._absolute.open("rb", buffering=0) as file:
                self._check_identity(file)
                yield file
                if _Identity.of(file) != self._identity:
                    raise self._changed_since_loading()
        except OSError as error:
            raise ChangedFileError(f"{self.path}: can no longer be read ({error.strerror}); load it again") from error

    def _check_identity(self, file: FileIO) -> None:
        identity = _Identity.of(file)
        if identity == self._identity:
            return
        if not self.checksums or replace(identity, ctime_ns=self._identity.ctime_ns) != self._identity:
            raise self._changed_since_loading()
        self._unchecked |= self._parts  # it has another mode or name, or was overwritten and its time reset
        self._identity = identity

    def _changed_since_loading(self) -> ChangedFileError:
        return ChangedFileError(
            f"{self.path}: the file has changed since it was loaded, so its weights are no longer available; load "
            "it again, and save every recording to its own file"
        )

    def _check_parts(self, file: FileIO | BytesIO) -> None:
        """Check the checksums of all tensors of which pieces are read, in one pass with little memory."""
        buffer = memoryview(bytearray(_STEP))
        names = sorted(self._unchecked, key=lambda name: self.entries[name].start)
        for name in names:
            entry, checksum = self.entries[name], 0
            file.seek(self._begin + entry.start)
            left = entry.stop - entry.start
            while left:
                count = file.readinto(buffer[: min(left, _STEP)])
                if not count:
                    raise self._changed_since_loading()
                checksum = zlib.crc32(buffer[:count], checksum)
                left -= count
            self._check_unchanged_since_saving(name, checksum)
        self._unchecked.difference_update(names)

    def _check_unchanged_since_saving(self, name: str, checksum: int) -> None:
        if self.checksums[name] != checksum:
            raise DamagedFileError(
                f"{self.path}: is damaged: {name}: the file was changed or damaged since it was saved"
            )

    def _tensor(self, file: FileIO | BytesIO, name: str, bounds: tuple[Bounds, ...]) -> Tensor:
        entry = self.entries[name]
        if (dtype := DTYPES.get(entry.dtype)) is None:
            raise TypeError(f"{name}: got {entry.dtype}, expected {', '.join(DTYPES)}")
        content = bytearray(math.prod(stop - start for start, stop in bounds) * dtype.itemsize)
        view, written = memoryview(content), 0
        for start, stop in _byte_ranges(entry.shape, bounds, dtype.itemsize):
            file.seek(self._begin + entry.start + start)
            end = written + stop - start
            while written < end:
                count = file.readinto(view[written:end])
                if not count:
                    raise self._changed_since_loading()
                written += count
        shape = [stop - start for start, stop in bounds]
        if self.checksums and tuple(shape) == entry.shape:
            self._check_unchanged_since_saving(name, zlib.crc32(content))
        if not content:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if dtype == torch.bool:  # any byte but 0 is True, also for readers of the tensor's memory
            return (torch.frombuffer(content, dtype=torch.uint8) != 0).view(shape)
        return torch.frombuffer(content, dtype=dtype).view(shape)


class TensorBytes(TensorFile):
    """The bytes of a safetensors file in memory, such as those that another process has sent.

    Attributes:
        path: what messages call it.
    """

    def __init__(self, name: str, content: bytes) -> None:
        """Read the header.

        Raises:
            NoTensorsError: the bytes are not those of a safetensors file.
        """
        self.path = Path(name)
        self._content = content
        self._read_header(BytesIO(content), len(content))

    @contextmanager
    def _open(self) -> Generator[FileIO | BytesIO]:
        """Return the bytes, which do not change."""
        yield BytesIO(self._content)


class TensorPart:
    """A tensor in a file, read when indexed: with whole numbers, then slices of step 1; other axes are whole."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file, self._name = file, name
        self.shape = file.entries[name].shape
        self.dtype = file.entries[name].dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Return the piece; raise as ``TensorFile.read``."""
        indices = index if isinstance(index, tuple) else (index,)
        bounds = [(0, n) for n in self.shape]
        for axis, each in enumerate(indices):
            if isinstance(each, slice):
                start, stop, step = each.indices(self.shape[axis])
                if step != 1:
                    raise IndexError(f"{self._name}: step {step}; expected 1")
                bounds[axis] = (start, max(start, stop))
            elif 0 <= each < self.shape[axis]:
                bounds[axis] = (each, each + 1)
            else:
                raise IndexError(f"{self._name}: index {each} of {self.shape[axis]}")
        piece = self._file.read_piece(self._name, tuple(bounds))
        return piece[tuple(slice(None) if isinstance(each, slice) else 0 for each in indices)]


def _parse_header(content: bytes, length: int) -> tuple[Mapping[str, str], dict[str, Entry]]:
    """Return the entries and metadata; raise NoTensorsError if it is not the header of a safetensors file."""
    try:
        header: dict[str, Any] = json.loads(content.decode())
        metadata: dict[str, Any] = header.pop("__metadata__", None) or {}
        entries = {name: _parse_entry(entry) for name, entry in header.items()}
        sound = len(content) == length and all(isinstance(each, str) for each in metadata.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise NoTensorsError("does not have a safetensors header") from error
    if not sound:
        raise NoTensorsError("does not have a safetensors header")
    return metadata, entries


def _parse_entry(entry: Mapping[str, Any]) -> Entry:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    numbers = (*shape, start, stop)
    if {*map(type, numbers)} != {int} or min(numbers) < 0:
        raise ValueError("sizes: expected whole numbers")
    if entry["dtype"] in DTYPES and math.prod(shape) * DTYPES[entry["dtype"]].itemsize != stop - start:
        raise ValueError("data_offsets: do not fit the shape")
    return Entry(str(entry["dtype"]), shape, start, stop)


def _check_places(entries: Iterable[Entry], size: int) -> None:
    """Check that tensors are contiguous, and fill the file.

    Raises:
        NoTensorsError: they do not.
    """
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end or entry.stop < entry.start:
            raise NoTensorsError("has tensors that overlap, or bytes that belong to none")
        end = entry.stop
    if end != size:
        raise NoTensorsError(f"has {size} bytes of tensors; expected {end}")


def _byte_ranges(shape: tuple[int, ...], bounds: tuple[Bounds, ...], itemsize: int) -> Iterator[Bounds]:
    """Yield the byte ranges of a piece, in order: one for each index of the axes before the last sliced one."""
    cut = [axis for axis, (n, each) in enumerate(zip(shape, bounds, strict=True)) if each != (0, n)]
    last = cut[-1] if cut else 0
    inner = math.prod(shape[last + 1 :]) * itemsize
    strides = [math.prod(shape[axis + 1 :]) * itemsize for axis in range(last)]
    start, stop = bounds[last] if bounds else (0, 1)
    for index in product(*(range(*each) for each in bounds[:last])):
        base = sum(n * stride for n, stride in zip(index, strides, strict=True))
        yield base + start * inner, base + stop * inner
