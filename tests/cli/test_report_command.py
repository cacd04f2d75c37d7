"""``headscope report``: the page of a recording, written or served, and mistakes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headscope import HeadStats, History, MultiHeadAttention, Observe, masks, observe, watch
from headscope.report.page import MARKER
from headscope.watching import About, Recording
from support.commands import Ran, Run
from support.html_pages import Page
from support.processes import POSIX


@pytest.fixture
def saved(run: Run) -> Path:
    """A recording with q and k in the folder that the command runs in."""
    q, k = torch.randn(2, 1, 3, 11, 5)
    found = observe(q, k, mask=masks.causal(), what=Observe(map=7, keep_qk=True)).named("a.0")
    return Recording(found, About("m", {}, {}, {"a.0": "self"}, None, 1, 1)).save("seen.safetensors", qk=True)


@pytest.mark.usefixtures("saved")
def test_a_page_is_written(run: Run) -> None:
    ran = run("report", "seen.safetensors", "--out", "page.html", "--title", "<b>mine</b>")
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"Open in a browser: page\.html \(\d\.\d MiB\)\n", ran.out)
    html = Path("page.html").read_text(encoding="utf-8")
    assert MARKER in html[:256]
    page = Page(html)
    assert [h1.text for h1 in page.all("h1")] == ["<b>mine</b>"]
    assert list(page.data["layers"][0]["strips"]["heads"]) == ["0", "1", "2"], "as it has q and k, strips are there"
    assert run("report", "seen.safetensors", "--strip", "0.2").code == 0
    page = Page(Path("headscope-report.html").read_text(encoding="utf-8"))
    assert list(page.data["layers"][0]["strips"]["heads"]) == ["2"]
    assert sorted(each["head"] for each in page.data["exact"]) == [0, 1, 2]
    for options, heads in ((("--exact", "0.1"), [1]), (("--exact", "none"), [])):
        assert run("report", "seen.safetensors", *options).code == 0
        page = Page(Path("headscope-report.html").read_text(encoding="utf-8"))
        assert [each["head"] for each in page.data["exact"]] == heads


@pytest.mark.usefixtures("saved")
def test_two_recordings_are_on_one_page(run: Run) -> None:
    q, k = torch.randn(2, 1, 3, 11, 5)
    later = Recording(
        observe(q, k, mask=masks.causal(), what=Observe(map=7)).named("a.0"), About("m", {}, {}, {}, None, 1, 1)
    )
    Path("later").mkdir()
    for name in ("later.safetensors", "later/seen.safetensors"):
        later.save(name)
    assert run("report", "seen.safetensors", "later.safetensors").code == 0
    html = Path("headscope-report.html").read_text(encoding="utf-8")
    assert '"labels":["seen.safetensors","later.safetensors"]' in html
    assert run("report", "seen.safetensors", "later/seen.safetensors").code == 0
    html = Path("headscope-report.html").read_text(encoding="utf-8")
    assert '"labels":["seen.safetensors","later/seen.safetensors"]' in html, (
        "names that are the same have their folders"
    )


@pytest.mark.usefixtures("saved")
def test_two_recordings_that_do_not_fit_are_refused(run: Run) -> None:
    q, k = torch.randn(2, 1, 3, 11, 5)
    Recording(observe(q, k).named("b.0"), About("m", {}, {}, {}, None, 1, 1)).save("b.safetensors")
    said = "headscope report: OTHER: "
    cases = {
        ("seen.safetensors", "none.safetensors"): f"{said}none.safetensors: no such file\n",
        ("seen.safetensors", ""): f"{said}is empty, expected a path\n",
        ("seen.safetensors", "seen.safetensors", "--serve"): f"{said}expected one recording with --serve, got two\n",
        ("seen.safetensors", "b.safetensors"): f"{said}expected a recording with the same layers, got none in common "
        "(the first: a.0, b.0)\n",
    }
    for arguments, message in cases.items():
        assert run("report", *arguments) == Ran(2, "", message)
    ran = run("report", "seen.safetensors", "b.safetensors", "--out", "b.safetensors", "--force")
    assert ran.code == 2
    assert "is the other recording itself, expected another file" in ran.err
    assert not Path("headscope-report.html").exists()


def test_an_image_lies_below(run: Run) -> None:
    q, k = torch.randn(2, 1, 3, 13, 5)
    found = observe(q, k, what=Observe(map=13)).named("a")
    Recording(found, About("m", {}, {}, {"a": "self"}, None, 1, 1)).save("seen.safetensors")
    pixels = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    Image.fromarray(pixels).save("photo.png")
    assert run("report", "seen.safetensors", "--image", "photo.png", "--grid", "3x4").code == 0
    image = Page(Path("headscope-report.html").read_text(encoding="utf-8")).data["image"]
    assert (image["height"], image["width"], image["grid"], image["special"]) == (6, 8, [3, 4], 1)
    leaves = ("report", "seen.safetensors", "--image", "photo.png", "--grid", "3x3")
    said = "--grid: 3 x 3 patches leave 4 of the 13 keys over, enough for a row or column of patches; "
    wanted = f"headscope report: {said}pass --special 4 if all of them come before the patches\n"
    assert run(*leaves) == Ran(2, "", wanted)
    assert run(*leaves, "--special", "4").code == 0
    fit = "--grid: expected rows x columns that match the 13 keys"
    assert run(*leaves, "--special", "3") == Ran(
        2,
        "",
        f"headscope report: {fit}, got 3 x 3 patches and 3 keys before them\n",
    )
    ran = run("report", "seen.safetensors", "--special", "4")
    assert ran == Ran(2, "", "headscope report: --special: requires --image\n")
    ran = run("report", "seen.safetensors", "--image", "photo.png", "--grid", "5x5")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"headscope report: {fit}, got 5 x 5 patches\n"


@pytest.mark.parametrize("read", ["seen.safetensors", "link.safetensors"])
@pytest.mark.parametrize("out", ["seen.safetensors", "./seen.safetensors", "link.safetensors"])
def test_what_is_read_is_not_replaced(read: str, out: str, saved: Path, run: Run) -> None:
    Path("link.safetensors").symlink_to(saved)
    before = saved.read_bytes()
    ran = run("report", read, "--out", out, "--force")
    assert (ran.code, ran.out, ran.err) == (
        2,
        "",
        f"headscope report: --out: {out}: is the recording itself, expected another file\n",
    )
    Image.new("RGB", (8, 6)).save("photo.png")
    ran = run(
        "report", "seen.safetensors", "--image", "photo.png", "--out", f"../{Path.cwd().name}/photo.png", "--force"
    )
    assert ran.code == 2
    assert "photo.png: is the image itself" in ran.err
    assert saved.read_bytes() == before
    assert Path("link.safetensors").is_symlink()


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "no file": (("no.safetensors",), "RECORDING: no.safetensors: no such file"),
    "a name of 300": (("a" * 300,), f"RECORDING: {'a' * 300}: cannot be read: File name too long\n"),
    "no recording": (("other.txt",), "RECORDING: other.txt: is not a file of headscope statistics"),
    "no name": (("",), "RECORDING: is empty, expected a path\n"),
    "page without a name": (("seen.safetensors", "--out", ""), "--out: is empty, expected the name of a file\n"),
    "over a file": (
        ("seen.safetensors", "--out", "other.txt"),
        "--out: other.txt: exists and is not a page that headscope wrote",
    ),
    "both": (("seen.safetensors", "--serve", "--out", "a.html"), "--serve: got --out too, expected one of the two"),
    "grid": (("seen.safetensors", "--grid", "14"), "--grid: got 14, expected rows and columns, as 14x14"),
    "grid alone": (("seen.safetensors", "--grid", "2x5"), "--grid: requires --image"),
    "image": (
        ("seen.safetensors", "--image", "other.txt"),
        "other.txt: not a readable picture, expected a PNG",
    ),
    "no image": (("seen.safetensors", "--image", "no.png"), "no.png: cannot be read: No such file or directory"),
    "strip": (("seen.safetensors", "--strip", "a.1"), "--strip: got a.1, expected a layer and a head, counted from 0"),
    "no such strip": (
        ("seen.safetensors", "--strip", "0.3"),
        "--strip: got 0.3, expected a head of layer 0, from 0 to 2\n",
    ),
    "no such layer": (("seen.safetensors", "--strip", "1.0"), "--strip: got 1.0, expected a layer from 0 to 0\n"),
    "17 strips": (("seen.safetensors", *("--strip", "0.1") * 17), "--strip: got 17 heads, expected at most 16\n"),
    "port": (("seen.safetensors", "--port", "80"), "--port: requires --serve\n"),
    "no such port": (
        ("seen.safetensors", "--serve", "--port", "65536"),
        "--port: got 65536, expected a whole number from 0 to 65535\n",
    ),
    "a port that is no number": (
        ("seen.safetensors", "--serve", "--port", "http"),
        "--port: got http, expected a whole number from 0 to 65535\n",
    ),
    "force": (
        ("seen.safetensors", "--out", "other.txt"),
        "--out: other.txt: exists and is not a page that headscope wrote; choose another name, or overwrite it with "
        "--force\n",
    ),
    "exact": (("seen.safetensors", "--exact", "1"), "--exact: got 1, expected a layer and a head, counted from 0"),
    "no such exact head": (
        ("seen.safetensors", "--exact", "0.3"),
        "--exact: layer 0 with head 3 does not exist; expected layers 0 to 0 or their names, of 3 heads\n",
    ),
    "9 exact heads": (("seen.safetensors", *("--exact", "0.1") * 9), "--exact: expected at most 8 heads, got 9\n"),
    "served exact heads": (("seen.safetensors", "--serve", "--exact", "0.1"), "--exact: expected none with --serve"),
    "served strips": (("seen.safetensors", "--serve", "--strip", "0.1"), "--strip: expected none with --serve"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.usefixtures("saved")
def test_a_mistake_is_one_line(name: str, run: Run) -> None:
    Path("other.txt").write_text("mine", encoding="utf-8")
    arguments, said = MISTAKES[name]
    ran = run("report", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"headscope report: {said}"), ran.err
    assert ran.err.count("\n") == 1
    assert Path("other.txt").read_text(encoding="utf-8") == "mine"
    assert sorted(os.listdir()) == ["other.txt", "seen.safetensors"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("saved")
def test_a_pipe_in_the_place_of_a_picture_is_refused(run: Run) -> None:
    os.mkfifo("pipe.png")
    message = "headscope report: pipe.png: is not a regular file, expected a PNG or a JPEG\n"
    assert run("report", "seen.safetensors", "--image", "pipe.png") == Ran(2, "", message)


def test_strips_need_q_and_k(run: Run, saved: Path) -> None:
    Recording.load(saved).save("plain.safetensors")
    ran = run("report", "plain.safetensors", "--strip", "0.0")
    said = "--strip: got 0.0, expected a recording with q and k; record it with watch --keep-qk"
    assert (ran.code, ran.out, ran.err) == (2, "", f"headscope report: {said}\n")


def test_a_map_with_every_weight_needs_no_strips(run: Run) -> None:
    q, k = torch.randn(2, 1, 3, 11, 5)
    found = {name: observe(q, k, what=Observe(map=bins, keep_qk=True)) for name, bins in (("a", 11), ("b", 7))}
    stats = HeadStats({name: each.parts["0"] for name, each in found.items()})
    Recording(stats, About("m", {}, {}, {"a": "self", "b": "self"}, None, 1, 1)).save("seen.safetensors", qk=True)
    ran = run("report", "seen.safetensors", "--strip", "0.2", "--strip", "1.1", "--strip", "0.0")
    said = "--strip: 0.2, 0.0: the map already holds every weight of the layer, so the page has no strip for it"
    assert (ran.code, ran.err) == (0, f"headscope report: {said}\n")
    layers = Page(Path("headscope-report.html").read_text(encoding="utf-8")).data["layers"]
    assert [list(layer["strips"]["heads"]) for layer in layers] == [[], ["1"]]


def test_strips_need_self_attention(run: Run, saved: Path) -> None:
    crossed = Recording(Recording.load(saved).stats, About("m", {}, {}, {"a.0": "cross"}, None, 1, 1))
    crossed.save("cross.safetensors", qk=True)
    ran = run("report", "cross.safetensors", "--strip", "0.0")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("headscope report: --strip: expected layers of self-attention, got layer 0: ")


@pytest.mark.parametrize("kept", [0.5, -1])
def test_a_recording_that_is_cut_short_is_called_so(kept: float, run: Run, saved: Path) -> None:
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    Path("cut.safetensors").write_bytes(whole[: round(header * 0.9) if kept == 0.5 else -1])
    said = "cut.safetensors: is truncated; its end is missing"
    with pytest.raises(ValueError, match=said):
        Recording.load("cut.safetensors")
    assert run("report", "cut.safetensors").err == f"headscope report: RECORDING: {said}\n"
    ran = run("watch", "text", "--text", "a", "--no-page", "--against", "cut.safetensors")
    assert (ran.code, ran.err) == (2, f"headscope watch: --against: {said}\n")


def test_serving_needs_q_and_k(run: Run, saved: Path) -> None:
    Recording.load(saved).save("plain.safetensors")
    ran = run("report", "plain.safetensors", "--serve")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("headscope report: --serve: expected a recording with q and k: watch --keep-qk")


@POSIX
def test_it_serves_until_ctrl_c(saved: Path) -> None:
    command: list[Any] = [sys.executable, "-u", "-m", "headscope.cli", "report", saved.name, "--serve"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as running:
        assert running.stdout is not None
        said = running.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", said)
        assert url is not None, said
        with urllib.request.urlopen(url[0], timeout=20) as answer:
            assert MARKER.encode() in answer.read(256)
        tile = f"{url[0]}tile?layer=0&head=1&i0=0&i1=11&j0=0&j1=11&size=16"
        with urllib.request.urlopen(tile, timeout=20) as answer:
            both = np.frombuffer(answer.read(), "<f4").reshape(2, 11, 11)
        wanted = Recording.load(saved).stats.tile(0, 11, 0, 11)[0, 1].numpy()
        np.testing.assert_array_equal(np.nan_to_num(both[0]), wanted)
        running.send_signal(signal.SIGINT)
        out, error = running.communicate(timeout=20)
        assert (running.returncode, out, error) == (130, "", "headscope: interrupted\n")


def test_watch_keeps_q_and_k_in_the_recording(run: Run) -> None:
    ran = run("watch", "text", "--text", "abc", "--keep-qk", "--no-page")
    assert (ran.code, ran.err) == (2, "headscope watch: --keep-qk: requires --out\n")
    ran = run(
        "watch", "text", "--text", "i love to code", "--keep-qk", "--out", "seen.safetensors", "--no-page", "--json"
    )
    assert ran.code == 0, ran.err
    stats = Recording.load("seen.safetensors").stats
    queries, keys = next(iter(stats.parts.values())).lengths or (0, 0)
    for layer in range(len(stats.layers)):
        p = stats[layer].tile(0, queries, 0, keys)[0].double()  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(
            p.amax((1, 2)), stats[layer].map.max.nan_to_num(0).amax((1, 2)), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(p.sum(-1), torch.ones(8, queries, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_the_footer_of_a_page_says_of_what_it_is(run: Run) -> None:
    def footer(*arguments: str) -> dict[str, str]:
        ran = run(*arguments)
        assert ran.code == 0, ran.err
        file = "headscope-report.html" if arguments[0] == "watch" else f"headscope-{arguments[0]}.html"
        page = Page(Path(file).read_text(encoding="utf-8"))
        return {name.text: value.text for name, value in zip(page.all("dt"), page.all("dd"), strict=True)}

    found = footer("text", "i love\tto code")
    assert list(found) == ["Model", "Input", "Averages", "Versions"]
    assert (found["Input"], found["Averages"]) == (
        "“i love\\tto code”, 6 tokens",
        "over up to 6 tokens per head",
    )
    Path("given.txt").write_text("one " * 400, encoding="utf-8")
    found = footer("text", "--file", "given.txt", "--layer", "2", "--head", "1", "--seed-random")
    assert found["Input"] == "given.txt, the last 256 of 401 tokens"
    assert found["Options"] == "layer=2, head=1, seed_random=True"
    found = footer("image", "--head", "0")
    assert list(found) == ["Model", "Input", "Options", "Averages", "Versions"]
    assert found["Input"] == "shipped sample 3, 8 × 8 patches"
    assert (found["Averages"], found["Options"]) == ("over up to 64 patches per head", "head=0")
    assert footer("watch", "text", "--text", "a" * 99)["Input"].startswith(f"“{'a' * 59}…”; ")
    assert footer("watch", "text", "--file", "given.txt")["Input"].startswith("given.txt; ")


# ---------------------------------------------------------------- the history of a training


@pytest.fixture
def trained(run: Run) -> History:
    """The history of three steps, in the folder that the command runs in."""
    model, history = MultiHeadAttention(10, 5), History("run.safetensors")
    with watch(model, log=history):
        for _ in range(3):
            model(torch.randn(2, 7, 10))
    return history


def test_the_history_of_a_training_has_its_page(trained: History, run: Run) -> None:
    ran = run("report", "run.safetensors", "--out", "run.html", "--title", "<b>mine</b>")
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(r"Open in a browser: run\.html \(\d\.\d MiB\)\n", ran.out)
    page = Page(Path("run.html").read_text(encoding="utf-8"))
    assert [h1.text for h1 in page.all("h1")] == ["<b>mine</b>"]
    facts = page.data["history"]
    assert facts["steps"] == [0, 1, 2] == list(trained.steps)
    assert {each["name"] for each in facts["quantities"]} == set(trained.names)
    assert page.data["layers"][0]["heads"] == 5


@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--serve",), "--serve"),
        (("--grid", "3x3"), "--grid"),
        (("--strip", "0.1"), "--strip"),
        (("--exact", "none"), "--exact"),
        (("--special", "0"), "--special"),
    ],
)
def test_options_of_recordings_do_not_apply_to_a_history(options: tuple[str, ...], named: str, run: Run) -> None:
    said = f"headscope report: {named}: does not apply to the history of a training\n"
    assert run("report", "run.safetensors", *options) == Ran(2, "", said)


@pytest.mark.usefixtures("trained")
def test_a_damaged_history_is_one_line(run: Run) -> None:
    content = bytearray(Path("run.safetensors").read_bytes())
    content[-30] ^= 1
    Path("run.safetensors").write_bytes(content)
    ran = run("report", "run.safetensors")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("headscope report: RECORDING: run.safetensors: is damaged: ")
    assert ran.err.count("\n") == 1
    Path("run.safetensors").write_bytes(content[: len(content) // 2])
    assert run("report", "run.safetensors").err == (
        "headscope report: RECORDING: run.safetensors: is truncated; its end is missing\n"
    )
