"""A recording whose file changes after it was loaded: one clear error, no other weights, and no SIGBUS."""

from __future__ import annotations

import http.client
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from headscope import HeadStats, Observe, Recording, masks, observe
from headscope.report.serving import Server
from headscope.stats._tensor_reader import TensorFile
from headscope.watching import About

LENGTH = 40
CHANGED = r"r\.safetensors: the file has changed since it was loaded, .*; load it again"


def recorded(seed: int = 0) -> Recording:
    q, k = torch.randn(2, 1, 2, LENGTH, 8, generator=torch.Generator().manual_seed(seed))
    stats = observe(q, k, mask=masks.causal(), bias=torch.ones(2, LENGTH, LENGTH), what=Observe(map=4, keep_qk=True))
    return Recording(stats.named("a"), About("m", {}, {}, {"a": "self"}, None, 1, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    saved = recorded().save(tmp_path / "r.safetensors", qk=True)
    os.utime(saved, ns=(0, 0))  # the time of a later write differs, however coarse the clock
    return saved


def overwrite(path: Path) -> None:
    for seed in range(1, 60):  # the header has as many digits as its numbers need
        other = recorded(seed).save(path.with_name("other.safetensors"), qk=True)
        if other.stat().st_size == path.stat().st_size:
            break
    else:
        raise AssertionError("no other recording is as long")
    path.write_bytes(other.read_bytes())


def shorten(path: Path) -> None:
    os.truncate(path, 4096)


def replace(path: Path) -> None:
    recorded(seed=1).save(path, qk=True)


CHANGES: list[Callable[[Path], None]] = [overwrite, shorten, replace]


@pytest.mark.parametrize("change", CHANGES)
def test_tiles_of_a_changed_file_are_one_clear_error(change: Callable[[Path], None], path: Path) -> None:
    recording = Recording.load(path)
    means = recording.stats.flat()
    recording.stats.tile(0, LENGTH, 0, LENGTH)
    change(path)
    with pytest.raises(ValueError, match=CHANGED):
        recording.stats.tile(0, LENGTH, 0, LENGTH)
    with pytest.raises(ValueError, match=CHANGED):
        recording.save(path.with_name("again.safetensors"), qk=True)
    assert recording.stats.flat() == means  # statistics are in memory, not in the file


def test_a_file_whose_time_was_put_back_is_checked_again(path: Path) -> None:
    stats = HeadStats.load(path)
    before = stats.tile(0, LENGTH, 0, LENGTH)
    path.chmod(0o600)
    assert torch.equal(stats.tile(0, LENGTH, 0, LENGTH), before), "its mode is not its content"
    entry = TensorFile(path).entries["0/qk/0/q"]
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("r+b") as file:
        file.seek(header + entry.start)
        file.write(bytes(entry.stop - entry.start))
    os.utime(path, ns=(0, 0))
    for _ in range(2):
        with pytest.raises(ValueError, match="qk/0/q: the file was changed or damaged since it was saved"):
            stats.tile(0, LENGTH, 0, LENGTH)


def test_tiles_of_a_removed_file_are_one_clear_error(path: Path) -> None:
    stats = HeadStats.load(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"r\.safetensors: can no longer be read \(No such file.*\); load it again"):
        stats.tile(0, 1, 0, 1)


def test_a_relative_path_is_that_of_the_folder_in_which_it_was_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    stats = HeadStats.load(path.name)
    monkeypatch.chdir("/")
    assert stats.tile(0, LENGTH, 0, LENGTH).equal(HeadStats.load(path).tile(0, LENGTH, 0, LENGTH))


@pytest.mark.parametrize("change", CHANGES)
def test_a_served_recording_whose_file_changes_refuses_tiles(change: Callable[[Path], None], path: Path) -> None:
    server = Server(Recording.load(path))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        change(path)
        address = urlsplit(server.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
        connection.request("GET", f"{address.path}tile?layer=0&head=0&i0=0&i1=8&j0=0&j1=8&size=8")
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
    finally:
        server.shutdown()
        server.server_close()
    assert answer.status == 400
    assert "the file has changed since it was loaded" in text


def test_pieces_of_a_file_are_those_of_the_tensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {
        "a": torch.randn(2, 3, 7, 5), "b": torch.rand(2, 3, 4) > 0.5, "c": torch.arange(6), "d": torch.zeros(0, 4),
        "e": torch.randn(3, 4).bfloat16(), "f": torch.tensor(3.0),
    }  # fmt: skip
    save_file(tensors, tmp_path / "t.safetensors", {"x": "y"})
    file = TensorFile(tmp_path / "t.safetensors")
    assert file.metadata == {"x": "y"}
    for name, x in file.read(tensors).items():
        assert x.dtype == tensors[name].dtype
        assert torch.equal(x, tensors[name])
        assert torch.equal(file.part(name)[:] if x.ndim else file.part(name)[()], x)
    for index in [
        (1, 2, slice(2, 6)),
        (0, 1, slice(2, 6), slice(1, 3)),
        (1, slice(0, 2)),
        (1, 2, 3, 4),
        (1, 0, slice(5, 5)),
    ]:
        assert torch.equal(file.part("a")[index], tensors["a"][index])
    with pytest.raises(IndexError, match="a: index 2 of 2"):
        file.part("a")[2]
    with pytest.raises(IndexError, match="a: step 2; expected 1"):
        file.part("a")[0, 0, ::2]


def test_a_tile_reads_no_more_than_its_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats, pieces = HeadStats.load(path), list[int]()
    read = TensorFile.read_piece

    def count(self: TensorFile, name: str, bounds: tuple[tuple[int, int], ...]) -> torch.Tensor:
        piece = read(self, name, bounds)
        pieces.append(piece.numel())
        return piece

    monkeypatch.setattr(TensorFile, "read_piece", count)
    stats.tile(0, 2, 0, 3)
    assert max(pieces) <= 3 * 8


def test_a_copy_of_a_file_is_read_from_its_own_place(path: Path) -> None:
    copy = Path(shutil.copy(path, path.with_name("copy.safetensors")))
    stats = HeadStats.load(copy)
    overwrite(path)
    assert stats.tile(0, LENGTH, 0, LENGTH).isfinite().all()
