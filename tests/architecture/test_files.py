"""Files are replaced whole or not at all, and are as open to others as the umask says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from headscope._support.files import replace_file


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_is_what_the_umask_leaves(mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"before")
    path.chmod(0o640)
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")  # to read it one sets it, for all threads
            replace_file(path, b"after")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    for name, target in (("link", "a"), ("second", "link"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    for content in (b"new", b"replaced"):
        replace_file(tmp_path / "second", content)
        assert (tmp_path / "a").read_bytes() == content
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "loop", b"")
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_symlink()) == ["link", "loop", "second"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_cannot_be_put_in_place_leaves_nothing_behind(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    path = tmp_path / "a"
    path.write_bytes(b"before")
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(error) as raised:
        replace_file(path, b"after")
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == b"before"
