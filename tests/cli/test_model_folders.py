"""Model folders that ask transformers to fetch, to import or to unpickle: nothing of it happens.

The hub, the kernels package and the loading of code are replaced by functions that record that they were reached. The
kernels package counts as installed. ``HF_HUB_OFFLINE`` is off.
"""

from __future__ import annotations

import builtins
import json
import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import modeling_utils
from transformers.integrations import hub_kernels
from transformers.models.auto import auto_factory

from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_loading import Loaded, load
from support.commands import Run
from support.model_folders import gpt2, save

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 3,
    "num_key_value_heads": 3, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
KERNEL = "kernels-community/flash-attn2"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a tokenizer."""
    return save(gpt2(), tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama without a tokenizer."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return save(model, tmp_path_factory.mktemp("models") / "llama", tokenizer=False)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral with two experts."""
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    model = transformers.MixtralForCausalLM(config)
    return save(model, tmp_path_factory.mktemp("models") / "experts", tokenizer=False)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 with a configuration for text and one for images."""
    vision = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = transformers.Gemma3Config(
        text_config={**SIZES, "head_dim": 8, "sliding_window": 16},
        vision_config={**vision, "num_attention_heads": 3, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        **{f"{name}_token_index": 32 - n for n, name in enumerate(("boi", "eoi", "image"), 1)},
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    return save(model, tmp_path_factory.mktemp("models") / "gemma", tokenizer=False)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was reached of the network, of compiled kernels, of a repository's code, and of pickles."""
    found: list[str] = []

    def trap(name: str) -> Any:
        def reach(*arguments: Any, **options: Any) -> Any:
            found.append(f"{name}{arguments!r:.120}")
            raise RuntimeError(f"{name} was reached")

        return reach

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(f"transformers.utils.hub.{name}", trap(name))
    for name in ("repo_exists", "model_info", "list_repo_files", "list_repo_tree", "list_repo_commits", "file_exists"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, trap(name))
    monkeypatch.setattr(socket.socket, "connect", trap("connect"))
    monkeypatch.setattr(socket, "getaddrinfo", trap("getaddrinfo"))
    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_, **__: True)
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", trap("get_kernel"), raising=False)
    for name in ("get_cached_module_file", "get_class_in_module"):
        monkeypatch.setattr(f"transformers.dynamic_module_utils.{name}", trap(name))
    monkeypatch.setattr(builtins, "input", trap("input"))
    monkeypatch.setattr(torch, "load", trap("torch.load"))
    return found


def changed(folder: Path, at: Path, file: str = "config.json", **keys: Any) -> Path:
    """A copy of a folder whose JSON file has other values; "text_config.x" names a nested one."""
    at = shutil.copytree(folder, at)
    read = json.loads((at / file).read_text(encoding="utf-8")) if (at / file).exists() else {}
    for path, value in keys.items():
        *outer, key = path.split(".")
        place = read
        for part in outer:
            place = place[part]
        place[key] = value
    (at / file).write_text(json.dumps(read), encoding="utf-8")
    return at


def passed(folder: Path) -> Loaded:
    """The model of a folder, after a forward pass."""
    loaded = load(str(folder))
    with torch.inference_mode():
        loaded.run(torch.tensor([[3, 4, 5]]))
    return loaded


IMPLEMENTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama", {"attn_implementation": KERNEL}),
    "attention, of another organisation": ("llama", {"attn_implementation": "evil/kernel@main:forward"}),
    "attention, as its own attribute": ("llama", {"_attn_implementation": KERNEL}),
    "attention, inside": ("llama", {"_attn_implementation_internal": KERNEL}),
    "attention, flash": ("llama", {"attn_implementation": "flash_attention_2"}),
    "attention, paged": ("llama", {"attn_implementation": f"paged|{KERNEL}"}),
    "attention, by sub-model": ("gemma", {"attn_implementation": {"": "sdpa", "text_config": KERNEL}}),
    "attention of the text": ("gemma", {"text_config.attn_implementation": KERNEL}),
    "attention of the text, attribute": ("gemma", {"text_config._attn_implementation": KERNEL}),
    "attention of the images": ("gemma", {"vision_config.attn_implementation": KERNEL}),
    "experts": ("experts", {"experts_implementation": "deepgemm"}),
    "experts, as its own attribute": ("experts", {"_experts_implementation": "sonicmoe"}),
}


@pytest.mark.parametrize("case", IMPLEMENTATIONS)
def test_an_implementation_that_a_configuration_names_is_not_fetched(
    case: str, request: pytest.FixtureRequest, reached: list[str], tmp_path: Path
) -> None:
    name, keys = IMPLEMENTATIONS[case]
    at = changed(request.getfixturevalue(name), tmp_path / "at", **keys)
    loaded = passed(at)
    assert reached == []
    for module in loaded.model.modules():
        config = getattr(module, "config", None)
        assert getattr(config, "_attn_implementation", "sdpa") in ("sdpa", "eager")
        assert getattr(config, "_experts_implementation", "eager") in ("eager", "grouped_mm", "batched_mm")


def test_an_implementation_that_is_not_used_is_said(llama: Path, tmp_path: Path, run: Run) -> None:
    at = changed(llama, tmp_path / "at", attn_implementation="evil/\x1bkernel")
    ran = run("watch", str(at), "--ids", "3 4 5", "--json")
    assert ran.code == 0
    assert r'config.json: attn_implementation is "evil/\x1bkernel", which is not used' in ran.err


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_implementation_of_transformers_own_is_kept(implementation: str, llama: Path, tmp_path: Path) -> None:
    loaded = load(str(changed(llama, tmp_path / "at", attn_implementation=implementation)))
    assert loaded.model.config._attn_implementation == implementation  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    assert loaded.notes == ()


HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "code, beside a known type": ("config.json", {"auto_map": {"AutoConfig": "evil/repo--a.A", "AutoModel": "a.A"}}),
    "name": ("config.json", {"name_or_path": "evil/repo", "_name_or_path": "evil/repo"}),
    "base": ("config.json", {"base_model_name_or_path": "evil/repo"}),
    "kernels": ("config.json", {"use_kernels": True, "kernel_config": {"GPT2Attention": "evil/repo:X"}}),
    "every kernel": ("config.json", {"allow_all_kernels": True, "trust_remote_code": True}),
    "gguf": ("config.json", {"gguf_file": "evil.gguf"}),
    "fusion": ("config.json", {"fusion_config": None, "extra_files": ["evil.bin"]}),
    "devices": ("config.json", {"device_map": "auto", "tp_plan": "auto", "state_dict": {}}),
    "tokenizer class": ("config.json", {"tokenizer_class": "evil/repo"}),
    "pipelines": ("config.json", {"custom_pipelines": {"x": {"impl": "evil/repo--a.A"}}}),
    "generation": (
        "generation_config.json",
        {"custom_generate": "evil/repo", "assistant_model": "evil/repo", "trust_remote_code": True, "auto_map": {}},
    ),
    "code of a tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil/repo--a.A", "a.B"]}}),
    "class of a tokenizer": ("tokenizer_config.json", {"tokenizer_class": "evil/repo.Tokenizer"}),
    "name of a tokenizer": ("tokenizer_config.json", {"name_or_path": "evil/repo", "tokenizer_file": "evil/repo"}),
    "processor": ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "evil/repo--a.A"}}),
    "processor, code": ("processor_config.json", {"auto_map": {"AutoProcessor": "evil/repo--a.A"}}),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_other_keys_fetch_and_import_nothing(case: str, plain: Path, reached: list[str], tmp_path: Path) -> None:
    file, keys = HARMLESS[case]
    at = changed(plain, tmp_path / "at", file, **keys)
    (at / "a.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    passed(at)
    assert reached == []
    assert not (tmp_path / "ran").exists()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "quantized": ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .* dequantize"),
    "quantized text": ("gemma", {"text_config.quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    "a pickled adapter": (
        "llama",
        {"transformers_weights": "adapter_model.bin"},
        "transformers_weights: .*safetensors",
    ),
    "weights elsewhere": ("llama", {"transformers_weights": "../w.safetensors"}, "transformers_weights: .*in the fold"),
    "backbone": ("llama", {"model_type": "dpt", "backbone": "evil/repo"}, "backbone: names .* evil/repo"),
    "backbone of timm": (
        "llama",
        {"model_type": "timm_backbone", "backbone": "hf-hub:evil/repo"},
        "backbone: names .* hf-hub:evil/repo",
    ),
    "architecture of timm": (
        "llama",
        {"model_type": "timm_wrapper", "architecture": "hf-hub:evil/repo"},
        "architecture: names .* hf-hub:evil/repo",
    ),
    "options of timm": (
        "llama",
        {"model_type": "timm_wrapper", "architecture": "vit", "model_args": {"checkpoint_path": "a.pth"}},
        "model_args: checkpoint_path",
    ),
    "code": ("llama", {"model_type": "zork", "auto_map": {"AutoConfig": "a.A"}}, "Python code of its repository"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_done_is_one_error(
    case: str, request: pytest.FixtureRequest, reached: list[str], tmp_path: Path
) -> None:
    name, keys, message = REFUSED[case]
    at = changed(request.getfixturevalue(name), tmp_path / "at", **keys)
    (at / "a.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    with pytest.raises(Mistake, match=message) as error:
        load(str(at))
    assert error.value.exit_code == 2
    assert "\n" not in error.value.format_message()
    assert reached == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vocab_size": 40},
            "lm_head.weight: expected shape [40, 24], as config.json describes the model, got [32, 24] in the files; "
            "1 more tensors do not match; use the config.json that belongs to these weights",
        ),
        (
            {"num_key_value_heads": 1},
            "model.layers.0.self_attn.k_proj.weight: expected shape [8, 24], as config.json describes the model, got "
            "[24, 24] in the files; 1 more tensors do not match; use the config.json that belongs to these weights",
        ),
        ({"num_attention_heads": 5}, "hidden size (24) is not a multiple of the number of attention heads (5)"),
        ({"num_attention_heads": "3"}, "num_attention_heads: expected an integer of at least 1, got '3'"),
    ],
    ids=["vocabulary", "shape", "heads", "kind"],
)
def test_a_configuration_that_does_not_fit_is_refused_with_the_reason(
    change: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    at = shutil.copytree(llama, tmp_path / "changed")
    config = json.loads((at / "config.json").read_text(encoding="utf-8"))
    (at / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")

    with pytest.raises(Mistake) as error:
        load(str(at))

    assert message in error.value.format_message()
    assert "\n" not in error.value.format_message()


@pytest.mark.parametrize(
    ("text", "kind"), [("[1]", "a list"), ("[]", "a list"), ('"x"', "a string"), ("5", "a number"), ("null", "null")]
)
def test_a_configuration_that_is_not_an_object_is_refused(text: str, kind: str, llama: Path, tmp_path: Path) -> None:
    at = shutil.copytree(llama, tmp_path / "changed")
    (at / "config.json").write_text(text, encoding="utf-8")

    with pytest.raises(Mistake) as error:
        load(str(at))

    assert error.value.format_message() == f"{at}: config.json: expected a JSON object, got {kind}"


def test_nobody_is_asked_whether_code_of_a_repository_may_run(
    llama: Path, reached: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal where a type is known but no model of it, and runs the code after a "y"."""
    monkeypatch.setattr(auto_factory._BaseAutoModelClass, "_model_mapping", {}, raising=False)
    monkeypatch.setattr(transformers.AutoModel, "_model_mapping", {})
    at = changed(llama, tmp_path / "at", architectures=["Zork"], auto_map={"AutoModel": "a.A"})
    with pytest.raises(Mistake, match="requires Python code of its repository"):
        load(str(at))
    assert reached == []


@pytest.mark.parametrize("installed", [False, True])
def test_an_adapter_is_refused(
    installed: bool, llama: Path, reached: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without peft transformers leaves the adapter out without a word; with it, it fetches the base model."""
    monkeypatch.setattr(auto_factory, "is_peft_available", lambda: installed)
    monkeypatch.setattr("transformers.integrations.peft.is_peft_available", lambda: installed)
    keys = {"base_model_name_or_path": "evil/repo", "peft_type": "LORA"}
    at = changed(llama, tmp_path / "at", "adapter_config.json", **keys)
    with pytest.raises(Mistake, match=r"adapter_config\.json: .*merge_and_unload"):
        load(str(at))
    assert reached == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads: expected an integer of at least 1, got 0; use the config"),
        ({"num_key_value_heads": "3"}, "num_key_value_heads: expected an integer of at least 1, got '3'; use the conf"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: expected an integer of at least 0, got -1; use the config.js"),
        (
            {"num_hidden_layers": 1_000_000_000},
            "num_hidden_layers: expected at most 12 layers, as the weights hold 12 tensors, got 1000000000; use the",
        ),
        (
            {"rope_parameters.rope_type": "spiral"},
            "rope_parameters.rope_type: expected one of default, linear, dynamic, yarn",
        ),
        ({"hidden_act": "gelo"}, "hidden_act: expected an activation of transformers, as gelu, got 'gelo'; use the"),
        ({"dtype": "float17"}, "dtype: expected one of float32, float16, bfloat16, float64, auto, got 'float17'; use"),
        ({"torch_dtype": 3}, "torch_dtype: expected one of float32, float16, bfloat16, float64, auto, got 3; use the"),
        ({"dtype": ["float16"]}, "dtype: expected one of float32, float16, bfloat16, float64, auto, got ['float16']"),
        ({"model_type": "llama9"}, "as 'llama', got 'llama9'; correct it, or update transformers"),
        ({"model_type": None}, "got none; correct it, or update transformers"),
    ],
)
def test_an_impossible_value_is_named_with_its_key(
    keys: dict[str, Any], message: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(Mistake, match=rf"at: config\.json: {next(iter(keys))}: .*{re.escape(message.split(': ')[-1])}"):
        load(str(changed(llama, tmp_path / "at", **keys)))


@pytest.mark.parametrize("keys", [{"return_dict": False}, {"dtype": "auto"}, {"dtype": {"": "auto"}}], ids=str)
def test_no_objects_and_a_dtype_of_auto_change_no_number(
    keys: dict[str, Any], llama: Path, tmp_path: Path, run: Run
) -> None:
    at = changed(llama, tmp_path / "at", **keys)
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        expected, got = (load(str(folder)).run(ids).logits for folder in (llama, at))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    watched = run("watch", str(at), "--ids", "1,2,3,4", "--no-page")
    assert (watched.code, "Traceback" in watched.err) == (0, False)


def test_a_dtype_of_auto_is_that_of_the_weights(llama: Path, tmp_path: Path) -> None:
    at = changed(llama, tmp_path / "at", dtype="auto")
    weights = {key: x.bfloat16() for key, x in load_file(at / "model.safetensors").items()}
    save_file(weights, at / "model.safetensors", {"format": "pt"})
    assert {x.dtype for x in load(str(at)).model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "torch.float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"dtype": {"": "torch.float64"}}, torch.float64),
        ({"dtype": {"": None}}, torch.float32),
        ({"dtype": "torch.auto", "torch_dtype": "float64"}, torch.float32),
    ],
)
def test_a_dtype_is_read_with_the_name_of_torch_before_it(
    keys: dict[str, Any], expected: torch.dtype, llama: Path, tmp_path: Path
) -> None:
    model = load(str(changed(llama, tmp_path / "at", **keys))).model
    assert {x.dtype for x in model.parameters()} == {expected}


def test_the_dtype_of_a_part_is_read_or_refused(tmp_path: Path) -> None:
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=28, patch_size=14
    )
    config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**SIZES), vision_config=vision)
    folder = save(transformers.LlavaForConditionalGeneration(config), tmp_path / "llava", tokenizer=False)
    for number, dtype in enumerate(("torch.float32", "auto")):
        at = changed(folder, tmp_path / f"{number}", **{"text_config.dtype": dtype})
        assert {x.dtype for x in load(str(at)).model.parameters()} == {torch.float32}
    at = changed(folder, tmp_path / "other", **{"text_config.dtype": "float17"})
    with pytest.raises(Mistake, match=r"config\.json: text_config\.dtype: expected one of .*, got 'float17'"):
        load(str(at))


def test_an_index_that_names_a_file_outside_is_refused(llama: Path, tmp_path: Path) -> None:
    at = shutil.copytree(llama, tmp_path / "at")
    weights = load_file(at / "model.safetensors")
    (at / "model.safetensors").rename(tmp_path / "model.safetensors")
    save_file({}, at / "other.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "../model.safetensors")}
    (at / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(Mistake, match=r"index\.json: weight_map: expected a file in the same folder, got '\.\./model"):
        load(str(at))


def test_an_index_that_names_a_pickle_is_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *a, **_: read.append(a) or {})
    at = shutil.copytree(llama, tmp_path / "at")
    weights = load_file(at / "model.safetensors")
    save_file(weights, at / "other.safetensors", {"format": "pt"})
    (at / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (at / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (at / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Mistake, match=r"pytorch_model\.bin.* pickle"):
        load(str(at))
    assert read == []


def test_a_model_that_loads_kernels_by_itself_runs_without_them(
    llama: Path, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RWKV and MRA do where they find CUDA, whatever the configuration says."""
    forward = transformers.LlamaForCausalLM.forward
    fetched: list[Any] = []

    def eager(self: Any, *args: Any, **kwargs: Any) -> Any:
        fetched.append(hub_kernels.lazy_load_kernel("deep-gemm", {}))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", eager)
    passed(llama)
    assert fetched == [None]
    assert reached == []


def test_what_is_replaced_while_a_model_loads_is_put_back(llama: Path) -> None:
    def replaced() -> SimpleNamespace:
        return SimpleNamespace(
            load=torch.load,
            offline=huggingface_hub.constants.HF_HUB_OFFLINE,
            kernels=hub_kernels.is_kernels_available,
        )

    before = replaced()
    passed(llama)
    assert replaced() == before


def test_a_name_on_the_hub_is_checked_like_a_folder(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40, encoding="utf-8")
    at = changed(llama, cached / "snapshots" / ("a" * 40), attn_implementation=KERNEL)
    loaded = load("org/name")
    assert loaded.notes == (f'config.json: attn_implementation is "{KERNEL}", which is not used',)
    shutil.rmtree(at)
    changed(llama, at, quantization_config={"quant_method": "fp8"})
    with pytest.raises(Mistake, match=r"org/name: config\.json: quantization_config: "):
        load("org/name")
