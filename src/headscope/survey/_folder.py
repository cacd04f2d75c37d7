"""The folder of a survey: its files, and claims by which processes share the work without talking to each other."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from headscope._support.files import replace_file

LEASE = 600.0
"""Seconds after which a claim of another host counts as dead, if its process has not renewed it."""

RENEWAL = 30.0
"""Seconds after which a process renews its claim."""

UNWRITTEN = 10.0
"""Seconds after which an empty claim counts as dead: its process died between creating and writing it."""

ABANDONED = 3600.0
"""Seconds after which a temporary file counts as left behind by a process that was killed."""


@dataclass(frozen=True)
class Folder:
    """The files of a survey.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def identity(self) -> Path:
        """The model, the options and the versions that all processes of the survey share."""
        return self.path / "survey.json"

    @property
    def plan(self) -> Path:
        """The corpus, and the borders of its shards."""
        return self.path / "shards.json"

    @property
    def seen(self) -> Path:
        """The result, as a recording; written last."""
        return self.path / "seen.safetensors"

    @property
    def documents(self) -> Path:
        """The result by documents."""
        return self.path / "documents.safetensors"

    @property
    def page(self) -> Path:
        """The page of the result."""
        return self.path / "survey.html"

    @property
    def shards(self) -> Path:
        """The folder of the results of the shards."""
        return self.path / "shards"

    def statistics_of(self, shard: int) -> Path:
        """Return the file with the statistics of a shard."""
        return self.shards / f"{shard:06d}.safetensors"

    def documents_of(self, shard: int) -> Path:
        """Return the file with the documents of a shard, which is written after its statistics."""
        return self.shards / f"{shard:06d}.documents.safetensors"

    def has(self, shard: int) -> bool:
        """Return whether a shard is complete."""
        return self.documents_of(shard).exists()

    def count_complete(self) -> int:
        """Return the number of complete shards."""
        return sum(name.endswith(".documents.safetensors") for name in os.listdir(self.shards) if name[0] != ".")

    def remove_abandoned(self) -> None:
        """Remove temporary files of processes that were killed while they wrote."""
        for folder in (self.path, self.shards):
            for path in folder.glob(".headscope-*.tmp"):
                with suppress(OSError):  # another process has removed it
                    if time.time() - path.stat().st_mtime > ABANDONED:
                        path.unlink()


def create_whole(path: Path, content: bytes) -> bool:
    """Create a file with its content at once; return False if it exists.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.parent / f".headscope-{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except (OSError, NotImplementedError):  # a file system without hard links
            return _create_exclusively(path, content)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _create_exclusively(path: Path, content: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    replace_file(path, json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


# ---------------------------------------------------------------- claims


@dataclass
class Claim:
    """A piece of work that this process has claimed.

    Attributes:
        path: the file of the claim.
        renewed: when it was created or renewed, by ``time.monotonic``.
    """

    path: Path
    renewed: float = field(default_factory=time.monotonic)

    def renew(self) -> None:
        """Show other hosts that the process is alive, at most every ``RENEWAL`` seconds."""
        if time.monotonic() - self.renewed > RENEWAL:
            self.renewed = time.monotonic()
            with suppress(OSError):  # another process has taken it over: both then write the same bytes
                os.utime(self.path)


@contextmanager
def claimed(path: Path) -> Generator[Claim | None]:
    """Claim a piece of work for the block; None if a living process has claimed it.

    A claim of a dead process is taken over. Two processes may work on the same piece if a claim is wrongly considered
    dead. They then write the same bytes.

    Raises:
        OSError: the claim cannot be written.
    """
    content = json.dumps(_this_process()).encode()
    is_free = not path.exists() or _take_over(path)
    if not is_free or not create_whole(path, content):
        yield None
        return
    try:
        yield Claim(path)
    finally:
        path.unlink(missing_ok=True)


def _take_over(path: Path) -> bool:
    """Remove the claim of a dead process; return whether the work is free."""
    before = _read(path)
    if before is None:
        return True
    if not _is_dead(path, before):
        return False
    aside = path.with_name(f".headscope-{secrets.token_hex(8)}.tmp")
    try:
        os.rename(path, aside)  # only one process succeeds
    except OSError:
        return False
    was_renewed = _read(aside) != before
    if was_renewed:  # another process has taken it over since it was read
        with suppress(OSError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)
    return not was_renewed


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _is_dead(path: Path, content: bytes) -> bool:
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:  # it has been released
        return True
    try:
        parsed: Any = json.loads(content)
        owner: dict[str, Any] = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
    except ValueError:
        owner = {}
    if not isinstance(owner.get("pid"), int):
        return age > UNWRITTEN
    this = _this_process()
    if owner.get("host") != this["host"] or this["start"] is None:
        return age > LEASE
    return owner.get("boot") != this["boot"] or _start_of(owner["pid"]) != owner.get("start")


@cache
def _boot() -> str:
    return (_read(Path("/proc/sys/kernel/random/boot_id")) or b"").decode().strip()


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": platform.node(), "boot": _boot(), "pid": pid, "start": _start_of(pid)}


def _start_of(pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; None if it has ended, or without a /proc."""
    stat = _read(Path(f"/proc/{pid}/stat"))
    if stat is None:
        return None
    after_name = stat.rpartition(b")")[2].split()
    return None if after_name[0] in (b"Z", b"X") else after_name[19].decode()
