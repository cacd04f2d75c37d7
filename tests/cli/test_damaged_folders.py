"""Model folders with damaged files: each is one line that names the file, and exit code 2."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_loading import load
from support.commands import Run
from support.model_folders import SIZES, gpt2, save

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a tokenizer, and its weights in one file."""
    return save(gpt2(), tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture(scope="module")
def shards(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its weights in several files and an index."""
    folder = tmp_path_factory.mktemp("models") / "shards"
    transformers.GPT2LMHeadModel.from_pretrained(whole).save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def at(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "at")


@pytest.fixture
def sharded(shards: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shards, tmp_path / "at")


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change what a JSON file holds."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def refusal(folder: Path) -> str:
    """Return the message with which a folder is refused, without its path."""
    with pytest.raises(Mistake) as error:
        load(str(folder))
    message = error.value.format_message()
    assert error.value.exit_code == 2
    assert "\n" not in message
    assert message.startswith(f"{folder}: ")
    return message.removeprefix(f"{folder}: ")


def refuse_to_build(*_: Any, **__: Any) -> Any:
    raise AssertionError("a model was built")


def test_a_default_number_of_layers_above_the_tensors_is_refused(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama has 32 layers of 28 GB where the configuration has no number."""
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", refuse_to_build)
    (at / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert refusal(at) == (
        "config.json: num_hidden_layers: expected at most 28 layers, as the weights hold 28 tensors, got none, which "
        "makes 32 in LlamaConfig; use the config.json that belongs to these weights"
    )


@pytest.mark.parametrize("architectures", [[], ["LlamaForCausalLM"]])
def test_a_model_much_larger_than_its_weights_is_refused(
    architectures: list[str], at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", refuse_to_build)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", refuse_to_build)
    config = {"model_type": "llama", "num_hidden_layers": 8, "vocab_size": 32, "architectures": architectures}
    (at / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size = (at / "model.safetensors").stat().st_size / 1e6
    model = "LlamaForCausalLM" if architectures else "LlamaModel"
    assert refusal(at).startswith(
        f"config.json: expected a model of the size of the weights ({size:.2g} MB), got {model} (6,47"
    )
    assert refusal(at).endswith(
        " MB in float32), most of which would be random; use the config.json that belongs to these weights"
    )


needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
PIPE = "expected a regular file, got a pipe, a socket or a device"


def replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@needs_pipes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "other.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused(file: str, at: Path) -> None:
    replace_by_pipe(at / file)
    assert refusal(at) == f"{file}: {PIPE}"


@needs_pipes
@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_an_index_is_refused(sharded: Path) -> None:
    replace_by_pipe(sharded / INDEX)
    assert refusal(sharded) == f"{INDEX}: {PIPE}"


@needs_pipes
@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_a_shard_is_refused(sharded: Path) -> None:
    (sharded / "inner").mkdir()
    replace_by_pipe(sharded / "inner" / "shard.safetensors")
    edit(sharded / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": "inner/shard.safetensors"}))
    assert refusal(sharded) == f"{Path('inner', 'shard.safetensors')}: {PIPE}"


@needs_pipes
@pytest.mark.timeout(60)
def test_a_pipe_in_a_folder_that_the_model_does_not_use_is_not_opened(at: Path) -> None:
    (at / "checkpoint").mkdir()
    os.mkfifo(at / "checkpoint" / "model.safetensors")
    assert load(str(at)).notes == ()


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_directory_in_the_place_of_a_file_is_refused(file: str, at: Path) -> None:
    (at / file).unlink()
    (at / file).mkdir()
    assert refusal(at) == f"{file}: expected a regular file, got a directory"


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="this system has no /dev/zero")
@pytest.mark.timeout(60)
def test_a_link_to_a_device_is_refused(at: Path) -> None:
    (at / "config.json").unlink()
    (at / "config.json").symlink_to("/dev/zero")
    assert refusal(at) == f"config.json: {PIPE}"


def test_links_to_regular_files_are_followed(at: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (at / file).rename(tmp_path / file)
        (at / file).symlink_to(tmp_path / file)
    (at / "absent.safetensors").symlink_to(tmp_path / "absent")
    assert load(str(at)).notes == ()


@pytest.mark.parametrize("target", ["absent", "config.json"], ids=["nothing", "itself"])
def test_a_configuration_that_is_a_link_to_nothing_is_none(target: str, at: Path) -> None:
    (at / "config.json").unlink()
    (at / "config.json").symlink_to(target)
    assert refusal(at) == "has no config.json, expected a folder written by save_pretrained of transformers"


def test_weights_that_are_a_link_to_nothing_are_none(at: Path) -> None:
    (at / "model.safetensors").unlink()
    (at / "model.safetensors").symlink_to("absent")
    assert refusal(at) == "has no weights in .safetensors"


def test_a_decoder_whose_configuration_claims_an_encoder_is_refused(at: Path) -> None:
    edit(at / "config.json", lambda config: config.update(is_encoder_decoder=True))
    assert refusal(at) == (
        "config.json: is_encoder_decoder: expected false, as the forward of GPT2LMHeadModel has no decoder_input_ids, "
        "got true; use the config.json that belongs to these weights"
    )


@pytest.mark.parametrize(
    ("architecture", "paired"),
    [("T5ForConditionalGeneration", True), ("T5EncoderModel", False), ("UMT5EncoderModel", False)],
)
def test_a_model_with_a_decoder_has_one_in_its_forward(architecture: str, paired: bool, tmp_path: Path) -> None:
    kind = getattr(transformers, architecture)
    config = kind.config_class(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, **SIZES)
    loaded = load(str(save(kind(config), tmp_path / "t5", tokenizer=False)))
    assert loaded.paired == paired
    with torch.inference_mode():
        loaded.run(torch.tensor([[3, 4, 5]]))  # without a decoder_start_token_id in the configuration


def without_unknown(tokenizer: dict[str, Any]) -> None:
    """As the class BertTokenizer makes of a vocabulary that has no [UNK]."""
    letters = {letter: id for id, letter in enumerate("abc")}
    tokenizer["model"] = {
        "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        "vocab": letters,
    }  # fmt: skip


def with_slow_pattern(tokenizer: dict[str, Any]) -> None:
    """Its search ends in a panic of Rust after a number of steps."""
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = pattern


@pytest.mark.parametrize(
    ("change", "text", "reason"),
    [(without_unknown, "xyz", "Missing [UNK] token"), (with_slow_pattern, "a" * 40 + "!", "retry-limit-in-match over")],
)
def test_a_tokenizer_that_raises_on_a_text_is_named(change: Any, text: str, reason: str, at: Path, run: Run) -> None:
    edit(at / "tokenizer.json", change)
    ran = run("watch", str(at), "--text", text, "--json")
    assert ran.code == 2
    last = ran.err.splitlines()[-1]  # a panic writes more in front of it
    assert last.startswith(f"headscope watch: {at}: tokenizer.json: cannot encode this text: ")
    assert reason in last
    assert last.endswith("; correct the file, or use headscope watch --ids")
    assert run("watch", str(at), "--ids", "1 2 3", "--json").code == 0


def test_an_interrupt_in_a_tokenizer_is_not_a_mistake(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(at))
    assert loaded.encode is not None

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loaded.encode("abc")


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write further tensors, or others, into the file of weights."""
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({**weights, **tensors}, path, {"format": "pt"})


@pytest.mark.parametrize("name", ["complex64", "int64", "int8", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["whole", "of the base"])
def test_weights_that_are_not_floats_are_refused(name: str, prefix: str, at: Path) -> None:
    """The imaginary part was dropped, and numbers without a scale were read as weights."""
    dtype = getattr(torch, name)
    if not prefix:  # names as in the files of openai-community/gpt2
        weights = {
            key.removeprefix("transformer."): each.clone() for key, each in load_file(at / "model.safetensors").items()
        }
        save_file(weights, at / "model.safetensors", {"format": "pt"})
    tensor = f"{prefix}h.1.attn.c_attn.weight"
    store(at, {tensor: torch.ones(24, 72).to(dtype)})
    assert refusal(at) == (
        f"model.safetensors: {tensor}: expected dtype float32, float16, bfloat16 or float64, got {name}; convert the "
        "tensor, or dequantize the model, and save it"
    )


def test_buffers_of_integers_are_read(at: Path) -> None:
    """As old files of GPT-2 hold them: the causal mask of each layer."""
    mask = torch.ones(1, 1, 29, 29)
    store(at, {"transformer.h.0.attn.bias": mask.bool(), "transformer.h.1.attn.bias": mask.to(torch.uint8)})
    loaded = load(str(at))
    assert not any("drawn at random" in note for note in loaded.notes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_every_width_are_read(dtype: torch.dtype, at: Path) -> None:
    store(at, {"transformer.h.1.attn.c_attn.weight": torch.ones(24, 72, dtype=dtype)})
    assert load(str(at)).notes == ()


def test_complex_tensors_that_the_model_leaves_out_are_a_note(at: Path) -> None:
    store(at, {"rotations": torch.ones(4, dtype=torch.complex64)})
    assert load(str(at)).notes == ("weights in the files that this model does not have are ignored: rotations",)


INDEXES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda index: index.pop("weight_map"), "weight_map: expected a JSON object, got null"),
    (lambda index: index.update(weight_map=[]), "weight_map: expected a JSON object, got a list"),
    (
        lambda index: index.update(weight_map={}),
        "weight_map: expected the file of each tensor, got an empty object",
    ),
    (lambda index: index["weight_map"].update(a=5), "weight_map: expected the name of a file, got a number"),
    (lambda index: index["weight_map"].update(a=""), "weight_map: expected the name of a file, got ''"),
    (lambda index: index["weight_map"].update(a="."), "weight_map: expected the name of a file, got '.'"),
    (lambda index: index.update(metadata=[]), "metadata: expected a JSON object, got a list"),
]


@pytest.mark.parametrize(("change", "message"), INDEXES)
def test_a_damaged_index_is_named_with_its_key(change: Any, message: str, sharded: Path) -> None:
    edit(sharded / INDEX, change)
    assert refusal(sharded) == f"{INDEX}: {message}"


@pytest.mark.parametrize(
    "change", [lambda index: index.pop("metadata"), lambda index: index.update(metadata=None)], ids=["none", "null"]
)
def test_an_index_needs_no_metadata(change: Any, sharded: Path, shards: Path) -> None:
    edit(sharded / INDEX, change)
    loaded = load(str(sharded))
    assert loaded.notes == ()
    expected = load(str(shards)).model.state_dict()
    torch.testing.assert_close(loaded.model.state_dict(), expected, rtol=0, atol=0)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    places = json.loads((sharded / INDEX).read_text(encoding="utf-8"))["weight_map"]
    first, last = min(places.values()), max(places.values())
    key = next(key for key, place in places.items() if place == first)
    other = {key: torch.zeros_like(load_file(sharded / first)[key])}
    save_file({**load_file(sharded / last), **other}, sharded / last, {"format": "pt"})
    got = f"got {first} and {last}; remove one of the two, or save the model again"
    assert refusal(sharded) == f"{key}: expected in one file of weights, {got}"


def test_an_index_beside_a_whole_file_of_the_same_tensors_is_refused(sharded: Path, whole: Path) -> None:
    shutil.copy(whole / "model.safetensors", sharded)
    places = json.loads((sharded / INDEX).read_text(encoding="utf-8"))["weight_map"]
    first = min(places.values())
    key = min(key for key, place in places.items() if place == first)
    got = f"got model.safetensors and {first}; remove one of the two, or save the model again"
    assert refusal(sharded) == f"{key}: expected in one file of weights, {got}"


@pytest.mark.parametrize("damaged", [False, True])
def test_an_index_of_other_tensors_beside_a_whole_file_is_a_note(damaged: bool, at: Path) -> None:
    save_file({"other": torch.ones(3)}, at / "a.safetensors", {"format": "pt"})
    if damaged:
        (at / "a.safetensors").write_bytes(b"none")
    (at / INDEX).write_text(json.dumps({"weight_map": {"other": "a.safetensors"}}), encoding="utf-8")
    assert load(str(at)).notes == (f"model.safetensors is read, and files of {INDEX} are not: a.safetensors",)


@pytest.mark.parametrize("place", ["model.safetensors", "absent.safetensors"])
def test_an_index_of_the_whole_file_or_of_absent_ones_changes_nothing(place: str, at: Path) -> None:
    weight_map = dict.fromkeys(load_file(at / "model.safetensors"), place)
    (at / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    assert load(str(at)).notes == ()


def test_a_file_that_an_index_names_in_two_ways_is_read_once(sharded: Path) -> None:
    def respell(index: Any) -> None:
        index["weight_map"]["transformer.wte.weight"] = f"./{index['weight_map']['transformer.wte.weight']}"

    edit(sharded / INDEX, respell)
    assert load(str(sharded)).notes == ()


def test_a_tensor_in_two_files_of_one_name_is_refused_with_their_folders(sharded: Path) -> None:
    places = json.loads((sharded / INDEX).read_text(encoding="utf-8"))["weight_map"]
    key, place = max(places.items(), key=lambda each: each[1])
    (sharded / "inner").mkdir()
    shutil.copy(sharded / place, sharded / "inner")
    edit(sharded / INDEX, lambda index: index["weight_map"].update({key: f"inner/{place}"}))
    edit(sharded / INDEX, lambda index: index["weight_map"].update(other=place))
    assert f": expected in one file of weights, got inner/{place} and {place}; remove one" in refusal(sharded)


@pytest.mark.parametrize(
    ("text", "got"), [("null", "null"), ("[]", "a list"), ("{", "text that is not valid JSON"), ("", "text that is")]
)
def test_an_index_that_is_not_an_object_is_refused(text: str, got: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text, encoding="utf-8")
    assert refusal(sharded).startswith(f"{INDEX}: expected a JSON object, got {got}")


@pytest.mark.parametrize(("text", "got"), [("null", "null"), ("[]", "a list"), ("5", "a number")])
def test_settings_of_generation_that_are_not_an_object_are_refused(text: str, got: str, at: Path) -> None:
    (at / "generation_config.json").write_text(text, encoding="utf-8")
    assert refusal(at) == f"generation_config.json: expected a JSON object, got {got}"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("architectures", [5], "a list of names of classes, got [5]"),
        ("dtype", 5, "one of float32, float16, bfloat16, float64, auto, got 5"),
        ("dtype", "nope", "one of float32, float16, bfloat16, float64, auto, got 'nope'"),
    ],
)
def test_names_in_a_configuration_that_are_not_names_are_refused(key: str, value: Any, expected: str, at: Path) -> None:
    edit(at / "config.json", lambda config: config.update({key: value}))
    assert refusal(at) == f"config.json: {key}: expected {expected}; use the config.json that belongs to these weights"


def test_tokens_beyond_the_vocabulary_are_the_tokenizers_mistake(at: Path, run: Run) -> None:
    edit(at / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(a=500))
    ran = run("watch", str(at), "--text", "abc", "--json")
    assert ran.code == 2
    assert ran.err.startswith("headscope watch: --text: the tokenizer of GPT2LMHeadModel")
    assert "expected token ids from 0 to 31, got 500; use the tokenizer of these weights, or --ids" in ran.err


def test_positions_that_begin_after_that_of_padding_shorten_the_context(tmp_path: Path, run: Run) -> None:
    import transformers

    config = transformers.RobertaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=66, pad_token_id=1,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    for tokens, windows in ((64, 1), (65, 2), (132, 3)):
        ran = run("watch", str(tmp_path), "--ids", ",".join(["5"] * tokens), "--json", "--no-page")
        assert (ran.code, json.loads(ran.out)["about"]["options"]["input"]["windows"]) == (0, windows)


@pytest.mark.parametrize("kind", ["Bert", "T5", "Gemma2", "Llama"])
def test_a_tokenizer_that_transformers_makes_up_is_not_used(kind: str, tmp_path: Path, run: Run) -> None:
    """For some classes it makes an empty one for a folder without its files: each word would be an unknown token."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16}
    sizes = {"vocab_size": 99, "d_model": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2} if kind == "T5" else sizes
    config = getattr(transformers, f"{kind}Config")(**sizes)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    ran = run("watch", str(tmp_path), "--text", "hello world", "--json")
    assert (ran.code, ran.out) == (2, "")
    assert "has no tokenizer that can be read (no tokenizer.json in the folder); use --ids" in ran.err


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{}", "no 'added_tokens'"), ("{not json", "Expecting property name"), ("[]", "cannot be interpreted")],
)
def test_a_damaged_tokenizer_is_named_with_its_reason(content: str, reason: str, at: Path, run: Run) -> None:
    (at / "tokenizer.json").write_text(content)
    ran = run("watch", str(at), "--text", "hello world", "--json")
    assert (ran.code, ran.out) == (2, "")
    named = re.search(r"has no tokenizer that can be read \((?P<files>[^:]*): (?P<reason>.*)\); use --ids", ran.err)
    assert named is not None, ran.err
    assert named["files"].startswith("tokenizer.json")
    assert reason in named["reason"]


@pytest.mark.parametrize("closed", ["", "config.json", "model.safetensors"], ids=["the folder", "config", "weights"])
def test_what_may_not_be_read_is_named(at: Path, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    """By what the system answers, since whoever runs the tests may read everything."""
    path, may = str(at / closed), os.access
    monkeypatch.setattr(os, "access", lambda asked, mode: str(asked) != path and may(asked, mode))
    with pytest.raises(Mistake, match=rf"^{path}: permission denied, expected a (file|folder) to read"):
        load(str(at))
