"""The shipped models: what they load as, and that their cards' figures are those of the shipped weights.

The definitions here are written out on their own and share nothing with training/evaluate.py.
"""

from __future__ import annotations

import errno
import importlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import headscope
from headscope.examples import DigitsExample, TextExample, load_example
from support.paths import DATA, ROOT

FOLDER = Path(headscope.__file__).parent / "examples"
LARGEST = 4_000_000  # bytes
SCORE = {"rtol": 0.0, "atol": 2e-4}  # room for other processors; the figures are written with five digits


@pytest.fixture(scope="module")
def text() -> TextExample:
    return load_example("text")


@pytest.fixture(scope="module")
def digits() -> DigitsExample:
    return load_example("digits")


@pytest.fixture(scope="module")
def heldout_ids(text: TextExample) -> list[int]:
    return text.tokenizer.encode((DATA / "heldout.txt").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def heldout_digits() -> tuple[Tensor, Tensor]:
    with np.load(DATA / "digits_heldout.npz", allow_pickle=False) as file:
        return torch.from_numpy(file["images"]).float() / 16, torch.from_numpy(file["labels"]).long()


@pytest.mark.parametrize("name", ["text", "digits"])
def test_an_example_is_ready_to_use(name: str) -> None:
    example = load_example(name)
    assert example.name == name
    assert example.trained
    assert not example.model.training
    for parameter_name, parameter in example.model.named_parameters():
        assert parameter.dtype == torch.float32, parameter_name
        assert parameter.device.type == "cpu", parameter_name
    for layer in example.model.layers:
        assert isinstance(layer.attention, headscope.MultiHeadAttention)
        assert layer.attention.num_heads == 8


@pytest.mark.parametrize("name", ["text", "digits"])
def test_the_weights_stay_small(name: str) -> None:
    assert (FOLDER / name / "model.safetensors").stat().st_size < LARGEST


@pytest.mark.parametrize("name", ["text", "digits"])
def test_seed_random_is_untrained_and_always_the_same(name: str) -> None:
    before = torch.get_rng_state()
    trained, first, second = (load_example(name, seed_random=random) for random in (False, True, True))
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)
    assert not first.trained
    states = [example.model.state_dict() for example in (trained, first, second)]
    assert states[0].keys() == states[1].keys()
    torch.testing.assert_close(states[1], states[2], rtol=0, atol=0)
    attention = "layers.0.attention.out_proj.weight"
    assert states[0][attention].shape == states[1][attention].shape
    assert (states[0][attention] - states[1][attention]).abs().max() > 1e-2


def test_loading_seeds_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(3)
    load_example("digits", seed_random=True)
    assert seeded == [3]


def test_the_default_device_does_not_matter() -> None:
    wanted = load_example("digits")
    with torch.device("meta"):
        found = load_example("digits")
    torch.testing.assert_close(found.model.state_dict(), wanted.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(found.samples[0].image, wanted.samples[0].image, rtol=0, atol=0)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"name: got 'txet', expected one of 'text', 'digits'"):
        load_example("txet")


def test_the_module_imports_neither_torch_nor_tokenizers() -> None:
    program = (
        "import sys, headscope.examples; print(sorted({'torch', 'tokenizers', 'PIL', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


# The tokenizer.


@pytest.mark.parametrize(
    "written",
    [
        "",
        "i love to code",
        "def f(x):\n        return 12.5\n\n\n",
        "tabs\t and \r\n line ends ",
        "naïve → 日本語 🎉",
        "\x00\x7f\u2028",
    ],
)
def test_text_comes_back_unchanged(text: TextExample, written: str) -> None:
    ids = text.tokenizer.encode(written)
    assert text.tokenizer.decode(ids) == written
    assert all(0 <= token < len(text.tokenizer) for token in ids)


def test_pieces_join_to_the_text(text: TextExample) -> None:
    written = "for key, value in table.items():\n    print(key)  # it's 42"
    pieces = text.tokenizer.pieces(written)
    assert "".join(pieces) == written
    offsets = text.tokenizer.offsets(written)
    assert [written[start:stop] for start, stop in offsets] == pieces
    assert [text.tokenizer.piece(token) for token in text.tokenizer.encode(written)] == pieces


def test_a_character_split_over_tokens_is_written_as_bytes(text: TextExample) -> None:
    pieces = text.tokenizer.pieces("a🎉")
    assert "".join(pieces) == "a\\xf0\\x9f\\x8e\\x89"
    assert len(pieces) > 2
    assert set(text.tokenizer.offsets("a🎉")[1:]) == {(1, 2)}


@pytest.mark.parametrize("token", [-1, 2048, 99999])
def test_a_token_that_is_not_there_is_an_error(text: TextExample, token: int) -> None:
    with pytest.raises(ValueError, match=f"token: expected 0 to 2047, got {token}"):
        text.tokenizer.piece(token)
    with pytest.raises(ValueError, match=f"token: expected 0 to 2047, got {token}"):
        text.tokenizer.decode([5, token])
    with pytest.raises(ValueError, match=rf"tokens: are {min(5, token)} to {max(5, token)}, expected 0 to 2047"):
        text.model(torch.tensor([[5, token]]))


def test_every_token_has_a_piece(text: TextExample) -> None:
    pieces = [text.tokenizer.piece(token) for token in range(len(text.tokenizer))]
    assert len(set(pieces)) == text.model.config.vocab_size
    with pytest.raises(ValueError, match="token: expected 0 to 2047, got 2048"):
        text.tokenizer.piece(2048)


# The text model.


def test_the_text_model_is_causal(text: TextExample, heldout_ids: list[int]) -> None:
    tokens = torch.tensor([heldout_ids[:31]])
    changed = tokens.clone()
    changed[:, 17:] = 5
    with torch.inference_mode():
        torch.testing.assert_close(text.model(tokens)[:, :17], text.model(changed)[:, :17])


def test_text_weights_are_those_of_every_layer(text: TextExample, heldout_ids: list[int]) -> None:
    tokens = torch.tensor(heldout_ids[: 3 * 13]).view(3, 13)
    with torch.inference_mode():
        logits, weights = text.model(tokens, need_weights=True)
        torch.testing.assert_close(logits, text.model(tokens))
    assert [tuple(layer.shape) for layer in weights] == [(3, 8, 13, 13)] * 6
    for layer in weights:
        torch.testing.assert_close(layer.sum(dim=-1), torch.ones(3, 8, 13))
        torch.testing.assert_close(layer.triu(1), torch.zeros_like(layer), rtol=0, atol=0)


def test_the_text_model_refuses_what_it_cannot_read(text: TextExample) -> None:
    with pytest.raises(ValueError, match=r"tokens: axis 1 \(T\) is 257, the context is 256; tokens \[1, 257\]"):
        text.model(torch.zeros(1, 257, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens: has 1 axes, expected 2 \(B, T\); tokens \[7\]"):
        text.model(torch.zeros(7, dtype=torch.long))


def test_heldout_loss_is_as_stated(text: TextExample, heldout_ids: list[int]) -> None:
    nats: list[float] = []
    # Each token after the first, from those before it in its window of 256.
    for start in range(0, len(heldout_ids) - 1, 256):
        inputs = heldout_ids[start : start + 256]
        targets = heldout_ids[start + 1 : start + 257]
        with torch.inference_mode():
            logits = text.model(torch.tensor([inputs[: len(targets)]]))[0].double()
        right = logits[torch.arange(len(targets)), torch.tensor(targets)]
        nats += (logits.logsumexp(dim=1) - right).tolist()
    first = len(text.tokenizer.piece(heldout_ids[0]).encode())
    size = (DATA / "heldout.txt").stat().st_size - first
    stated = text.figures["heldout"]
    assert stated["tokens"] == len(nats)
    assert stated["bytes"] == size
    assert stated["nats_per_token"] == pytest.approx(sum(nats) / len(nats), abs=1e-4)
    assert stated["bits_per_byte"] == pytest.approx(sum(nats) / size / math.log(2), abs=1e-4)
    assert stated["bits_per_byte"] < 1.5


Keys = Callable[[list[int], int], list[int]]


def head_scores(
    model: torch.nn.Module, sequences: list[list[int]], rows: range, *keys_of: Keys
) -> list[tuple[Tensor, int]]:
    """Return, by `keys_of(sequence, i)`, the mean weight [layers, heads] over rows with such keys, and how many."""
    totals, counts = torch.zeros(len(keys_of), 6, 8, dtype=torch.float64), [0] * len(keys_of)
    for first in range(0, len(sequences), 8):
        part = sequences[first : first + 8]
        with torch.inference_mode():
            _, weights = model(torch.tensor(part), need_weights=True)
        stacked = torch.stack(weights, dim=1)  # [B, layers, H, T, T]
        for sequence, maps in zip(part, stacked, strict=True):
            for n, keys in enumerate(keys_of):
                chosen = torch.zeros(maps.shape[-2:], dtype=torch.bool)
                for i in rows:
                    chosen[i, keys(sequence, i)] = True
                totals[n] += maps[:, :, chosen].double().sum(dim=-1)
                counts[n] += int(chosen.any(dim=-1).sum())
    return [(total / count, count) for total, count in zip(totals, counts, strict=True)]


def token_before(sequence: list[int], i: int) -> list[int]:
    return [i - 1] if i else []


def after_earlier_copies(sequence: list[int], i: int) -> list[int]:
    return [j for j in range(1, i + 1) if sequence[j - 1] == sequence[i]]


def test_head_scores_on_heldout_text_are_as_stated(text: TextExample, heldout_ids: list[int]) -> None:
    windows = [heldout_ids[start : start + 256] for start in range(0, 32 * 256, 256)]
    scores = head_scores(text.model, windows, range(256), token_before, after_earlier_copies)
    for name, (found, _) in zip(("previous", "induction"), scores, strict=True):
        stated = torch.tensor(text.figures["heads"][name], dtype=torch.float64)
        torch.testing.assert_close(found, stated, msg=lambda text, name=name: f"{name}: {text}", **SCORE)


def test_induction_on_repeated_random_tokens_is_as_stated(text: TextExample) -> None:
    block = np.random.default_rng(0).integers(0, 2048, (32, 64)).tolist()
    [(found, rows)] = head_scores(text.model, [ids + ids for ids in block], range(64, 128), after_earlier_copies)
    assert rows == 32 * 64
    stated = torch.tensor(text.figures["heads"]["induction_repeated"], dtype=torch.float64)
    torch.testing.assert_close(found, stated, **SCORE)


def test_the_copy_of_random_tokens_is_foretold_as_stated(text: TextExample) -> None:
    block = torch.from_numpy(np.random.default_rng(0).integers(0, 2048, (32, 64)))
    tokens = torch.cat([block, block], dim=1)
    with torch.inference_mode():
        nats = -text.model(tokens).log_softmax(dim=-1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    stated = text.figures["repeated"]
    assert stated["first_copy_nats"] == pytest.approx(nats[:, :63].mean().item(), abs=1e-3)  # tokens 1 to 63
    assert stated["second_copy_nats"] == pytest.approx(nats[:, 64:].mean().item(), abs=1e-3)  # tokens 65 to 127


def test_previous_token_and_induction_heads_have_formed(text: TextExample) -> None:
    heads = {name: torch.tensor(scores).max().item() for name, scores in text.figures["heads"].items()}
    assert heads["previous"] > 0.5
    assert heads["induction_repeated"] > 0.4
    repeated = text.figures["repeated"]
    assert repeated["first_copy_nats"] - repeated["second_copy_nats"] > 4


# The digits model.


def test_digits_accuracy_is_as_stated(digits: DigitsExample, heldout_digits: tuple[Tensor, Tensor]) -> None:
    images, labels = heldout_digits
    with torch.inference_mode():
        log_p = digits.model(images).log_softmax(dim=1)
    stated = digits.figures["heldout"]
    assert stated["images"] == len(labels) == 360
    assert stated["correct"] == int((log_p.argmax(dim=1) == labels).sum())
    assert stated["accuracy"] == pytest.approx(stated["correct"] / 360, abs=1e-5)
    assert stated["accuracy"] >= 0.97
    assert stated["nats"] == pytest.approx(-log_p[torch.arange(360), labels].mean().item(), abs=1e-4)


def test_digits_head_figures_are_as_stated(digits: DigitsExample, heldout_digits: tuple[Tensor, Tensor]) -> None:
    apart = torch.tensor([[math.dist(divmod(p, 8), divmod(q, 8)) for q in range(64)] for p in range(64)])
    with torch.inference_mode():
        _, weights = digits.model(heldout_digits[0], need_weights=True)
    for index, layer in enumerate(weights):
        assert tuple(layer.shape) == (360, 8, 64, 64)
        torch.testing.assert_close(layer.sum(dim=-1), torch.ones(360, 8, 64))
        distance = torch.einsum("bhqk,qk->h", layer, apart) / (360 * 64)
        entropy = -(layer * layer.clamp_min(1e-30).log()).sum(dim=(0, 2, 3)) / (360 * 64)
        torch.testing.assert_close(distance, torch.tensor(digits.figures["heads"]["distance"][index]), **SCORE)
        torch.testing.assert_close(entropy, torch.tensor(digits.figures["heads"]["entropy"][index]), **SCORE)


def test_digits_samples_are_heldout_digits(digits: DigitsExample, heldout_digits: tuple[Tensor, Tensor]) -> None:
    images, labels = heldout_digits
    assert [sample.label for sample in digits.samples] == [*range(10), *range(10)]
    for sample in digits.samples:
        same = (images == sample.image).all(dim=(1, 2))
        assert labels[same].tolist() == [sample.label]


def test_the_digits_model_refuses_other_sizes(digits: DigitsExample) -> None:
    with pytest.raises(ValueError, match=r"images: got \[2, 7, 8\], expected \[B, 8, 8\]"):
        digits.model(torch.zeros(2, 7, 8))
    with pytest.raises(ValueError, match=r"images: got \[8, 8\], expected \[B, 8, 8\]"):
        digits.model(torch.zeros(8, 8))


# The cards.


def test_the_text_card_states_the_figures(text: TextExample) -> None:
    for group in ("heldout", "repeated"):
        for name in {"nats_per_token", "bits_per_byte", "first_copy_nats", "second_copy_nats"} & set(
            text.figures[group]
        ):
            assert str(text.figures[group][name]) in text.card, name
    for scores in text.figures["heads"].values():
        score, layer, head = max((value, i, j) for i, row in enumerate(scores) for j, value in enumerate(row))
        assert f"{layer}.{head} ({score:.3f})" in text.card


def test_the_digits_card_states_the_figures(digits: DigitsExample) -> None:
    heldout = digits.figures["heldout"]
    assert f"{100 * heldout['accuracy']:.1f} % ({heldout['correct']} of {heldout['images']})" in digits.card
    assert f"{heldout['nats']} nats" in digits.card


@pytest.mark.parametrize("name", ["text", "digits"])
def test_figures_are_plain_json(name: str) -> None:
    figures = json.loads((FOLDER / name / "figures.json").read_text(encoding="utf-8"))
    assert figures == load_example(name).figures
    assert {"seed", "steps", "minutes"} <= figures["training"].keys()


# The loop that trained them.


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = ROOT / "training"
    if not folder.is_dir():
        pytest.skip("the training scripts are not here")
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("loop")


def run(loop: Any, folder: Path, *, on_step: Callable[[int], None] = lambda step: None, **options: Any) -> Any:
    """Train a tiny model for 11 steps; return how it ended, and the checkpoint's tensors."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))

    def loss_of(step: int) -> tuple[Tensor, float]:
        on_step(step)
        inputs = torch.randn(13, 5, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        return loss, loss.item()

    optimizers = loop.make_optimizers(model, matrix_rate=0.02, rate=0.01, weight_decay=0.1)
    arguments = {"about": {"seed": 3}, "resume": False, **options}
    outcome = loop.train(model, optimizers, loss_of, loop.Schedule(11, 2), folder, **arguments)
    with safe_open(folder / loop.CHECKPOINT, framework="pt") as file:
        return outcome, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no dict


def test_an_interrupted_run_resumes_to_the_same_bits(loop: Any, tmp_path: Path) -> None:
    whole, expected = run(loop, tmp_path / "whole")
    again, repeated = run(loop, tmp_path / "again")
    assert (whole.steps, whole.interrupted) == (again.steps, again.interrupted) == (11, False)
    torch.testing.assert_close(repeated, expected, rtol=0, atol=0)

    interrupted, _ = run(
        loop, tmp_path / "parts", on_step=lambda step: signal.raise_signal(signal.SIGINT) if step == 4 else None
    )
    assert (interrupted.steps, interrupted.interrupted) == (5, True)
    resumed, found = run(loop, tmp_path / "parts", resume=True)
    assert (resumed.steps, resumed.interrupted) == (11, False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_run_that_cannot_resume_says_why(loop: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing to resume: .*checkpoint\.safetensors does not exist"):
        run(loop, tmp_path, resume=True)
    run(loop, tmp_path, stop_at=2)
    with pytest.raises(ValueError, match=r"is of another run: \{'seed': 3\}, this one is \{'seed': 5\}"):
        run(loop, tmp_path, resume=True, about={"seed": 5})


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(loop, tmp_path, stop_at=2)
    before = (tmp_path / loop.CHECKPOINT).read_bytes()

    def half(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loop, "save_file", half)
    with pytest.raises(OSError, match="No space left"):
        run(loop, tmp_path, resume=True)
    assert [each.name for each in tmp_path.iterdir()] == [loop.CHECKPOINT]
    assert (tmp_path / loop.CHECKPOINT).read_bytes() == before


def test_ctrl_c_once_more_waits_for_the_checkpoint(loop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = os.replace

    def strike_and_put(*paths: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        put(*paths)

    monkeypatch.setattr(os, "replace", strike_and_put)
    outcome, _ = run(loop, tmp_path, on_step=lambda step: signal.raise_signal(signal.SIGINT) if step == 4 else None)
    assert (outcome.steps, outcome.interrupted) == (5, True)
