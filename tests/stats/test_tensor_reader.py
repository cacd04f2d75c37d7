"""Safetensors files that another program wrote, or writes while they are read: one clear error, never other numbers."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headscope import HeadStats, Observe, attend, observe
from headscope.masks import Dense, causal
from headscope.stats import _header, _statistics_file
from headscope.stats._checks import check_kept, check_parts
from headscope.stats._layer import Kept
from headscope.stats._tensor_reader import ChangedFileError, NoTensorsError, TensorFile
from support.recording_files import without_checksums


def entry(shape: list[Any], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


def stats_file(folder: Path) -> Path:
    q, k = torch.randn(2, 1, 2, 5, 4)
    return observe(q, k).save(folder / "heads.safetensors")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": entry([2.0], 0, 8)}, "does not have a safetensors header"),
        ({"a": entry([True], 0, 4)}, "does not have a safetensors header"),
        ({"a": entry([-2], 0, 8)}, "does not have a safetensors header"),
        ({"a": entry([3], 0, 8)}, "does not have a safetensors header"),
        ({"__metadata__": {"length": 3}, "a": entry([2], 0, 8)}, "does not have a safetensors header"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, "has tensors that overlap, or bytes that belong to none"),
        ({"a": entry([1], 4, 8)}, "has tensors that overlap, or bytes that belong to none"),
        ({"a": entry([1], 0, 4)}, "has 8 bytes of tensors; expected 4"),
        ({"a": entry([3], 0, 12)}, "has 8 bytes of tensors; expected 12"),
    ],
)
def test_a_header_that_does_not_describe_its_tensors_is_refused(
    entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    header = json.dumps(entries).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(NoTensorsError, match=f"^{message}$"):
        TensorFile(path)
    assert _header.read_header(path) is None
    with pytest.raises(ValueError, match=r"x.safetensors: is not a file of headscope statistics$"):
        HeadStats.load(path)


def test_a_tensor_of_a_dtype_that_headscope_never_writes_is_named(tmp_path: Path) -> None:
    path = stats_file(tmp_path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = without_checksums(file.metadata())
    save_file(tensors | {"0/received": tensors["0/received"].to(torch.float8_e5m2)}, path, metadata)
    with pytest.raises(ValueError, match=r"heads.safetensors: is damaged: 0/received: got F8_E5M2, expected BOOL, U8"):
        HeadStats.load(path)


@pytest.mark.parametrize("missing", [1, 100])
def test_a_file_that_ends_within_its_tensors_is_cut_short(missing: int, tmp_path: Path) -> None:
    path = stats_file(tmp_path)
    os.truncate(path, path.stat().st_size - missing)
    with pytest.raises(ValueError, match=r"heads.safetensors: is truncated; its end is missing"):
        HeadStats.load(path)


def test_a_file_that_changes_while_it_is_loaded_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stats_file(tmp_path)
    monkeypatch.setattr(
        _statistics_file, "check_format", lambda *_: os.utime(path, ns=(0, 0))
    )  # between header and tensors
    with pytest.raises(ChangedFileError, match=r"heads.safetensors: the file has changed since it was loaded"):
        HeadStats.load(path)


def test_a_file_that_becomes_shorter_within_a_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stats_file(tmp_path)
    file = TensorFile(path)
    monkeypatch.setattr(TensorFile, "_check_identity", lambda *_: None)  # it became shorter after this check
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ChangedFileError, match=r"heads.safetensors: the file has changed since it was loaded"):
        file.read(file.entries)


def test_a_file_that_is_written_to_within_a_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stats_file(tmp_path)
    file = TensorFile(path)
    read = TensorFile._tensor
    monkeypatch.setattr(TensorFile, "_tensor", lambda *given: (os.utime(path, ns=(0, 0)), read(*given))[1])
    with pytest.raises(ChangedFileError, match=r"heads.safetensors: the file has changed since it was loaded"):
        file.read(file.entries)


def test_a_file_that_becomes_shorter_while_its_checksums_are_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stats_file(tmp_path)
    file = TensorFile(path)
    last = max(file.entries, key=lambda name: file.entries[name].stop)
    file.checksums = dict.fromkeys(file.entries, 0)
    piece = file.part(last)
    monkeypatch.setattr(TensorFile, "_check_identity", lambda *_: None)  # it became shorter after this check
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ChangedFileError, match=r"heads.safetensors: the file has changed since it was loaded"):
        piece[:0]


def test_runs_of_several_lengths_are_saved_and_loaded(tmp_path: Path) -> None:
    q, k = torch.randn(2, 1, 2, 5, 4)
    stats = observe(q, k).merge(observe(q[:, :, :3], k[:, :, :3]))
    back = HeadStats.load(stats.save(tmp_path / "heads.safetensors"))
    assert back.parts["0"].lengths is None
    assert back.flat() == stats.flat()


def test_saved_weights_have_the_softcap_and_the_mask_of_their_call(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    q, k = 4 * torch.randn(2, 1, 2, 7, 4, generator=random)
    mask = Dense(torch.rand(7, 7, generator=random) < 0.5)
    stats = observe(q, k, mask=mask, softcap=1.5, what=Observe(keep_qk=True))
    back = HeadStats.load(_statistics_file.save(stats.parts, None, tmp_path / "qk.safetensors", False, qk=True))
    expected = (1.5 * torch.tanh(q @ k.transpose(-2, -1) / 2 / 1.5)).masked_fill(~mask.tensor, -torch.inf)
    expected = torch.softmax(expected, -1).nan_to_num(0.0)  # a row without a visible key
    for each in (stats, back):
        torch.testing.assert_close(each.tile(0, 7, 0, 7), expected)


def test_saved_weights_have_an_lse_that_was_given_and_float64_where_it_was_only_rounded(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    q, k = 30 * torch.randn(2, 1, 2, 7, 4, generator=random)
    lse = attend(q, k, k).lse
    assert float(lse.abs().max()) > 1_000  # float32 rounds it by more than 1e-4, which is the error of a weight
    lse[..., 0] += 0.5  # that of more keys, say
    stats = observe(q, k, lse=lse, what=Observe(keep_qk=True))
    back = HeadStats.load(_statistics_file.save(stats.parts, None, tmp_path / "qk.safetensors", False, qk=True))
    expected = torch.softmax(q.double() @ k.double().transpose(-2, -1) / 2, -1)
    expected[..., 0, :] *= math.exp(-0.5)
    tile = back.tile(0, 7, 0, 7).double()
    torch.testing.assert_close(tile[..., 1:, :], expected[..., 1:, :], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(tile[..., 0, :], expected[..., 0, :], rtol=2e-4, atol=1e-7)


def test_a_number_where_there_is_no_weight_is_damage() -> None:
    q, k = torch.randn(2, 1, 2, 8, 4)
    stored = observe(q, k, mask=causal(), what=Observe(map=4)).map
    check_parts("0", {"map": stored})
    stored.max[:, 0, 3] = 0.5  # a bin above the diagonal
    with pytest.raises(ValueError, match=r"0/map/max: got 0.5 where there is no weight, expected NaN"):
        check_parts("0", {"map": stored})


def test_a_key_in_a_row_that_does_not_count_is_damage() -> None:
    queries, counted = torch.tensor([0]), torch.zeros(1, 1, 1, dtype=torch.bool)
    check_kept("0", Kept(queries, counted, {"argmax": torch.tensor([[[-1]]])}))
    with pytest.raises(ValueError, match="0/argmax: got a key in a row that does not count, expected -1"):
        check_kept("0", Kept(queries, counted, {"argmax": torch.tensor([[[3]]])}))
