"""Claims: exactly one living process works on a shard, and those of dead processes are taken over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headscope.survey import _folder
from headscope.survey._folder import Folder, claimed, create_whole

HAS_PROC = Path("/proc/self/stat").exists()


def owner(path: Path, **changes: Any) -> None:
    """Write the claim of another process."""
    path.write_text(json.dumps({**_folder._this_process(), **changes}))


def test_a_claim_is_given_once_and_released(tmp_path: Path) -> None:
    path = tmp_path / "0.claim"
    with claimed(path) as first, claimed(path) as second:
        assert first is not None
        assert second is None
    assert not path.exists()
    with claimed(path) as third:
        assert third is not None


def test_a_claim_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), claimed(tmp_path / "0.claim"):
        raise KeyError
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not HAS_PROC, reason="without /proc a process of this machine counts as one of another")
def test_a_claim_of_a_process_that_has_ended_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "0.claim"
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner(path, pid=process.pid, start=_folder._start_of(process.pid))
        with claimed(path) as claim:
            assert claim is None, "it is alive"
        process.kill()
        while _folder._start_of(process.pid) is not None:  # ends, and is a zombie until it is waited for
            time.sleep(0.01)
        with claimed(path) as claim:
            assert claim is not None
        assert os.listdir(tmp_path) == []
        process.communicate()


@pytest.mark.parametrize(
    "changes",
    [{"start": "1"}, {"boot": "another"}],
    ids=["its number belongs to a new process", "the machine restarted"],
)
@pytest.mark.skipif(not HAS_PROC, reason="without /proc a process of this machine counts as one of another")
def test_a_number_that_another_process_has_now_is_not_taken_for_the_owner(
    changes: dict[str, str], tmp_path: Path
) -> None:
    owner(tmp_path / "0.claim", **changes)
    with claimed(tmp_path / "0.claim") as claim:
        assert claim is not None


@pytest.mark.parametrize(("age", "is_taken"), [(0.0, False), (_folder.LEASE + 60, True)])
def test_a_claim_of_another_host_is_taken_over_once_its_lease_has_ended(
    age: float, is_taken: bool, tmp_path: Path
) -> None:
    path = tmp_path / "0.claim"
    owner(path, host="another", pid=1)
    os.utime(path, (time.time() - age,) * 2)
    with claimed(path) as claim:
        assert (claim is not None) == is_taken


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
@pytest.mark.parametrize("age", [0.0, _folder.UNWRITTEN + 5])
def test_a_claim_that_was_not_written_is_taken_over_after_a_while(content: str, age: float, tmp_path: Path) -> None:
    path = tmp_path / "0.claim"
    path.write_text(content)
    os.utime(path, (time.time() - age,) * 2)
    with claimed(path) as claim:
        assert (claim is not None) == (age > 0)


def test_a_claim_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed(tmp_path / "0.claim") as claim:
        assert claim is not None
        os.utime(claim.path, (0, 0))
        claim.renew()
        assert claim.path.stat().st_mtime == 0, "not yet"
        monkeypatch.setattr(_folder, "RENEWAL", -1.0)
        claim.renew()
        assert claim.path.stat().st_mtime > 0
        claim.path.unlink()
        claim.renew()  # taken over by another process


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_is_created_once_with_all_its_content(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    assert create_whole(tmp_path / "a", b"first")
    assert not create_whole(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_files_that_killed_processes_left_behind_are_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.shards.mkdir()
    old, new = folder.shards / ".headscope-1.tmp", tmp_path / ".headscope-2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    folder.remove_abandoned()
    assert not old.exists()
    assert new.exists(), "another process may be writing it"
