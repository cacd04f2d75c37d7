"""Checksums of saved statistics: whatever is changed in a file, no number of it is shown."""

from __future__ import annotations

import json
import random
import re
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import headscope
from headscope import HeadStats, Observe, Recording, masks, observe, watch
from headscope.masks import Dense
from headscope.stats import _statistics_file
from headscope.stats._tensor_reader import TensorFile
from support.commands import Run
from support.recording_files import without_checksums

DAMAGED = "the file was changed or damaged since it was saved"
LENGTH = 6
KEPT = ("q", "k", "lse", "bias", "rest", "spans")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with row quantities, a map, edges, kept rows, q and k."""
    torch.manual_seed(0)
    model = nn.Sequential(headscope.MultiHeadAttention(8, 2)).eval()
    what = Observe(map=3, edges=3, top=2, keep_rows=True, keep_qk=True)
    with torch.no_grad(), watch(model, what=what, texts=list("abcdef")) as seen:
        model(torch.randn(1, LENGTH, 8))
    return seen.save(tmp_path_factory.mktemp("whole") / "whole.safetensors", qk=True)


@pytest.fixture(scope="module", params=["bias and mask", "band"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics with each kind of tensor that tiles are computed from."""
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, LENGTH, 4, generator=draw)
    mask = masks.causal()
    options: dict[str, Any] = {}
    if request.param == "bias and mask":
        mask = Dense(torch.rand(LENGTH, LENGTH, generator=draw) < 0.5)
        options["bias"] = torch.randn(2, LENGTH, LENGTH, generator=draw)
    stats = observe(q, k, mask=mask, what=Observe(keep_qk=True), **options)
    path = tmp_path_factory.mktemp("kept") / "kept.safetensors"
    return _statistics_file.save(stats.parts, None, path, False, qk=True)


def header_of(content: bytes) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and what the header holds."""
    begin = 8 + int.from_bytes(content[:8], "little")
    return begin, json.loads(content[8:begin])


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def places(content: bytes) -> Iterator[tuple[str, int]]:
    """The name of each tensor, and a byte within it."""
    begin, header = header_of(content)
    dice = random.Random(0)
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] < entry["data_offsets"][1]:
            yield name, begin + dice.randrange(*entry["data_offsets"])


def error_of(do: Callable[[], object]) -> str:
    try:
        do()
    except ValueError as error:
        return str(error)
    return ""


def test_one_bit_of_any_tensor_is_found_and_named(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "r.safetensors"
    errors: dict[str, str] = {}
    for number, (name, at) in enumerate(places(content)):
        path.write_bytes(flipped(content, at, number % 8))
        errors[name] = error_of(lambda: Recording.load(path).stats.tile(1, 3, 2, 5))
    assert len(errors) > 100
    expected = {name: f"{path}: is damaged: {name}: {DAMAGED}" for name in errors}
    assert errors == expected


def test_one_bit_of_what_tiles_are_computed_from_is_found_with_the_first_tile(kept: Path, tmp_path: Path) -> None:
    content, path = kept.read_bytes(), tmp_path / "r.safetensors"
    kinds = {name.rpartition("/")[2]: at for name, at in places(content) if "/qk/" in name}
    assert {"q", "k", "lse"} < {*kinds} <= {*KEPT}
    for name, at in kinds.items():
        path.write_bytes(flipped(content, at, 0))
        for take in (
            lambda stats: stats.tile(0, 1, 0, 1),
            lambda stats: stats.tile(0, LENGTH, 0, LENGTH),
            lambda stats: _statistics_file.save(stats.parts, None, tmp_path / "again.safetensors", True, qk=True),
        ):
            assert f"is damaged: 0/qk/0/{name}: {DAMAGED}" in error_of(lambda take=take: take(HeadStats.load(path)))


def test_one_bit_of_the_header_is_found(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "r.safetensors"
    begin, header = header_of(content)
    numbers = [at.start() for at in re.finditer(rb"\d", content[8:begin])]
    dice = random.Random(0)
    flips = [(8 + at, 0) for at in dice.sample(numbers, 300)]
    flips += [(dice.randrange(begin), dice.randrange(8)) for _ in range(300)]
    for text in (b"headscope.checksums", b"headscope.origin", b"headscope.recording", b'checksums\\"', b"scale"):
        flips += [(content.index(text) + n, 0) for n in (0, len(text) - 3)]
    unseen: list[tuple[int, int]] = []
    for at, bit in flips:
        variant = flipped(content, at, bit)
        path.write_bytes(variant)
        if not error_of(lambda: Recording.load(path)):
            unseen.append((at, bit))
    assert unseen == []
    assert header["__metadata__"]["headscope.stats"]


def changed(name: str, **values: Any) -> Callable[[dict[str, Any]], object]:
    def change(entries: dict[str, Any]) -> None:
        layer = entries["headscope.stats"]["layers"][0]
        (layer["qk"][0] if name == "qk" else entries["headscope.recording"]["about"]).update(values)

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed("qk", scale=0.7),
        changed("qk", offset=3),
        changed("qk", softcap=1.0),
        changed("about", kinds={}),
        changed("about", forwards=5),
        lambda entries: entries["headscope.stats"]["layers"][0].update(looked_at=9, of=9, lengths=None),
        lambda entries: entries["headscope.origin"].update(layers={}),
        lambda entries: entries.pop("headscope.origin"),
        lambda entries: entries["headscope.checksums"]["tensors"].pop(),
        lambda entries: entries["headscope.stats"].pop("checksums"),
        lambda entries: entries["headscope.stats"].update(checksums=False),
        lambda entries: entries.pop("headscope.checksums"),
    ],
)
def test_another_number_in_the_header_is_one_clear_error(change: Callable[[Any], object], whole: Path) -> None:
    tensors, entries = read(whole)
    held = {name: json.loads(entry) for name, entry in entries.items()}
    change(held)
    path = whole.with_name("r.safetensors")
    save_file(tensors, path, {name: json.dumps(entry) for name, entry in held.items()})
    with pytest.raises(
        ValueError, match=r"r.safetensors: is damaged: (its header was changed or damaged|it lacks '.*checksums')"
    ):
        Recording.load(path)


def test_a_newer_format_of_checksums_is_refused(whole: Path, tmp_path: Path) -> None:
    tensors, entries = read(whole)
    newer = json.dumps({**json.loads(entries["headscope.checksums"]), "version": 2})
    save_file(tensors, tmp_path / "r.safetensors", {**entries, "headscope.checksums": newer})
    with pytest.raises(ValueError, match=r"format 2, this version of headscope reads up to 1"):
        Recording.load(tmp_path / "r.safetensors")


def test_what_other_programs_add_to_the_header_is_left_alone(whole: Path, tmp_path: Path) -> None:
    tensors, entries = read(whole)
    save_file(tensors, tmp_path / "r.safetensors", {**entries, "format": "pt"})
    expected = Recording.load(whole).stats.tile(0, LENGTH, 0, LENGTH)
    assert torch.equal(Recording.load(tmp_path / "r.safetensors").stats.tile(0, LENGTH, 0, LENGTH), expected)


def test_a_file_without_checksums_is_read_as_before(whole: Path, tmp_path: Path) -> None:
    tensors, entries = read(whole)
    save_file(tensors, tmp_path / "r.safetensors", without_checksums(entries))
    old, new = Recording.load(tmp_path / "r.safetensors"), Recording.load(whole)
    assert old.to_dict() == new.to_dict()
    assert torch.equal(old.stats.tile(0, LENGTH, 0, LENGTH), new.stats.tile(0, LENGTH, 0, LENGTH))


def test_a_weight_above_1_in_a_file_without_checksums_is_refused(whole: Path, tmp_path: Path) -> None:
    tensors, entries = read(whole)
    tensors["0/qk/0/lse"].view(-1)[0] -= 2
    save_file(tensors, tmp_path / "r.safetensors", without_checksums(entries))
    stats = Recording.load(tmp_path / "r.safetensors").stats
    with pytest.raises(
        ValueError, match=rf"r.safetensors: is damaged: 0/qk/0: expected weights .* at most 1, got .*{DAMAGED}"
    ):
        stats.tile(0, LENGTH, 0, LENGTH)


@pytest.mark.parametrize("by", [2.0, 0.5])
def test_damage_in_a_file_without_checksums_is_no_less_when_it_is_saved_anew(
    by: float, whole: Path, tmp_path: Path
) -> None:
    """Rows that are checked sum to more than 1, at any place; of the others each weight is checked with its tile."""
    tensors, entries = read(whole)
    tensors["0/qk/0/lse"][0, 1, 4] -= by
    save_file(tensors, tmp_path / "old.safetensors", without_checksums(entries))
    seen = Recording.load(tmp_path / "old.safetensors")
    with pytest.raises(ValueError, match=rf"old.safetensors: is damaged: 0/qk/0: expected .* at most 1, .*{DAMAGED}"):
        seen.save(tmp_path / "new.safetensors", qk=True)
    assert not (tmp_path / "new.safetensors").exists()


def test_what_had_no_checksums_stays_unverified_when_it_is_saved_anew(tmp_path: Path) -> None:
    length = 100
    q, k = torch.randn(2, 1, 2, length, 4, generator=torch.Generator().manual_seed(0))
    stats = observe(q, k, mask=masks.causal(), what=Observe(keep_qk=True))
    path = _statistics_file.save(stats.parts, None, tmp_path / "r.safetensors", False, qk=True)
    assert "unverified" not in read(path)[1]["headscope.stats"]
    tensors, entries = read(path)
    tensors["0/qk/0/lse"][0, 1, 3] -= 9  # a row that is not checked
    save_file(tensors, tmp_path / "0.safetensors", without_checksums(entries))
    for number in range(2):
        old = HeadStats.load(tmp_path / f"{number}.safetensors")
        _statistics_file.save(old.parts, None, tmp_path / f"{number + 1}.safetensors", False, qk=True)
    stats = HeadStats.load(tmp_path / "2.safetensors")
    with pytest.raises(ValueError, match=rf"2.safetensors: is damaged: 0/qk/0: expected weights .*{DAMAGED}"):
        stats.tile(0, length, 0, length)


def test_logits_that_round_are_no_damage(tmp_path: Path) -> None:
    q, k = 70 * torch.randn(2, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    stats = observe(q, k, what=Observe(keep_qk=True))
    path = _statistics_file.save(stats.parts, None, tmp_path / "r.safetensors", False, qk=True)
    expected = HeadStats.load(path).tile(0, 9, 0, 9)
    tensors, entries = read(path)
    tensors["0/qk/0/lse"] = tensors["0/qk/0/lse"].float() * (1 - 2e-7)  # as of other logits, in float32
    save_file(tensors, path, without_checksums(entries))
    old = HeadStats.load(path)
    tile = old.tile(0, 9, 0, 9)
    torch.testing.assert_close(tile, expected, rtol=0.01, atol=1e-6)
    assert tile.max() > 1.001, "they do round"
    _statistics_file.save(old.parts, None, tmp_path / "new.safetensors", False, qk=True)
    assert torch.equal(HeadStats.load(tmp_path / "new.safetensors").tile(0, 9, 0, 9), tile)


def test_a_damaged_recording_is_one_line_of_the_command(whole: Path, run: Run) -> None:
    content = whole.read_bytes()
    for name, at in places(content):
        if name in ("0/qk/0/lse", "0/received"):
            Path("r.safetensors").write_bytes(flipped(content, at, 7))
            ran = run("report", "r.safetensors")
            assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
            assert f"r.safetensors: is damaged: {name}: {DAMAGED}" in ran.err


def test_a_long_file_is_checked_once_and_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 1, 1, 40_000, 64)  # 20 MB
    stats = observe(q, k, what=Observe(keep_qk=True, rows=2))
    stats = HeadStats.load(_statistics_file.save(stats.parts, None, tmp_path / "r.safetensors", False, qk=True))
    passes: list[int] = []
    check = TensorFile._check_unchanged_since_saving
    monkeypatch.setattr(
        TensorFile,
        "_check_unchanged_since_saving",
        lambda self, name, sum_: (passes.append(0), check(self, name, sum_)),
    )
    tracemalloc.start()
    stats.tile(0, 2, 0, 2)
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest < 4 * 2**20
    assert len(passes) >= 3
    threads = [threading.Thread(target=stats.tile, args=(n, n + 2, n, n + 2)) for n in range(4)]
    count = len(passes)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(passes) == count


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
