"""headscope check --model: a folder is loaded as by the other commands, and its model is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import model_folders
from support.commands import Run, answer, run

__all__ = ["run"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folders.save(model_folders.gpt2(), tmp_path_factory.mktemp("models") / "small")


def test_a_sound_model_has_exit_code_0(run: Run, folder: Path) -> None:
    findings = answer(run("check", "--model", str(folder), "--json"))
    assert findings["findings"] == []
    assert findings["subject"] == "GPT2LMHeadModel"
    assert findings["understood"][0] == "called as model(input_ids [1, 23], attention_mask [1, 23]), in float64"
    assert "with its cache, token by token: equal to the whole" in findings["understood"]


def test_what_is_slow_is_reported_and_does_not_fail(run: Run, folder: Path, tmp_path: Path) -> None:
    eager = tmp_path / "eager"
    eager.mkdir()
    for file in folder.iterdir():
        (eager / file.name).write_bytes(file.read_bytes())
    config = json.loads((eager / "config.json").read_text())
    (eager / "config.json").write_text(json.dumps({**config, "n_positions": 29, "attn_implementation": "eager"}))
    ran = run("check", "--model", str(eager), "--length", "4096")
    assert ran.code == 0
    assert "· quadratic-memory  slow" in ran.out


@pytest.mark.parametrize("name", ["text", "digits"])
def test_the_shipped_models_are_sound(run: Run, name: str) -> None:
    assert answer(run("check", "--model", name, "--json"))["findings"] == []


def test_pickles_are_not_read(run: Run, folder: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((folder / "config.json").read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch reached'\ntR.")
    ran = run("check", "--model", str(pickled))
    assert ran.code == 2
    assert not Path("reached").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "targets: missing, expected FILE.py:NAME, a folder, or --model DIR"),
        (("a.py:A", "--model", "x"), "--model: got a.py:A, too, expected either files or --model DIR"),
        (("--model", "x", "--heads", "3"), "--heads: describes attention modules, and does not go with --model"),
        (("--model", "x", "--args", "3"), "--args: describes attention modules, and does not go with --model"),
        (("--model", "./x"), "./x: is not a folder, expected the folder of a model or a name on the hub"),
    ],
)
def test_arguments_that_do_not_go_together(run: Run, arguments: tuple[str, ...], message: str) -> None:
    ran = run("check", *arguments)
    assert (ran.code, ran.err.strip()) == (2, f"headscope check: {message}")
