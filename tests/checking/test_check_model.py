"""check_model: six public faults, each named first; faults of every question; healthy models; state; errors."""

from __future__ import annotations

import copy
import json
import math
import random as python_random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from headscope import check_model
from headscope.checking import CheckError
from headscope.checking._whole_model.catalogue import EXPLAINS, MODEL_CATALOGUE
from headscope.checking._whole_model.subject import copy_model
from support.faulty_models import FAULTS, IDS, WIDTH, SelfAttention, TextModel, build_faulty
from support.paths import DOCS
from support.watched_models import PLAIN, SIZES, spread

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def llama(kind: Any = transformers.LlamaForCausalLM, **sizes: Any) -> Any:
    torch.manual_seed(0)
    return spread(kind(transformers.LlamaConfig(**{**SIZES, **sizes})))


# ---------------------------------------------------------------- public faults


@pytest.mark.parametrize("name", FAULTS)
def test_a_public_fault_is_the_first_finding(name: str) -> None:
    findings = check_model(*build_faulty(name))
    assert findings.names == (FAULTS[name],), str(findings)


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_model_without_the_fault_has_no_finding(name: str) -> None:
    findings = check_model(*build_faulty(name, faulty=False))
    assert findings.names == (), str(findings)
    assert not findings


def test_evidence_names_rows_sides_and_modules() -> None:
    seen = check_model(*build_faulty("unsloth"))["nan-from-padding"].seen
    assert seen.startswith("input_ids padded on the left, 3 tokens: 13 of 26 rows of the output are NaN or infinite;")
    assert seen.endswith("the first module with such an output is layers.0.out")
    assert "12 of 17 rows that cross returns are 0" in check_model(*build_faulty("vllm-omni"))["mask-zeroes-rows"].seen


# ---------------------------------------------------------------- faults of each question


class Plain(nn.Module):
    """One layer over vectors, [B, T, E], that a test changes."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.attention = SelfAttention()
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.attention.split(x)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.change in ("causal", "leaks"):
            visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(int(self.change == "leaks"))
            scores = scores.masked_fill(~visible, -1e9)
        if mask is not None and self.change != "ignores":
            hidden = ~mask.bool()[:, None, None, :]
            scores = scores.masked_fill(hidden & (torch.arange(2) == 0)[:, None, None], -1e9)  # the first head
            if self.change != "one head":
                scores = scores.masked_fill(hidden, -1e9)
        out = self.attention.join(scores.softmax(-1) @ v)
        if self.change == "dropout":
            out = nn.functional.dropout(out, 0.5)
        elif self.change == "noise":
            out = out + torch.randn_like(out)
        elif self.change == "state":
            self.calls += 1
            out = out * (1 + 0.1 * self.calls)
        elif self.change == "mean":
            out = out - out.mean(0)
        elif self.change == "length":
            out = out / x.shape[1]
        elif self.change == "nan":
            out = (out - 1e3).sqrt()
        return x + out


PLAIN_FAULTS = {
    "dropout": "dropout-in-eval",
    "noise": "random-in-eval",
    "state": "state-between-calls",
    "mean": "batch-changes-output",
    "nan": "not-finite",
    "ignores": "mask-ignored",
    "one head": "padding-leaks",
    "length": "padding-changes-output",
}


@pytest.mark.parametrize("change", PLAIN_FAULTS)
def test_a_fault_of_a_plain_module_is_the_only_finding(change: str) -> None:
    inputs = {"x": numbers(2, 11, WIDTH), "mask": torch.ones(2, 11, dtype=torch.long)}
    findings = check_model(Plain(change), inputs)
    assert findings.names == (PLAIN_FAULTS[change],), str(findings)


def test_a_sound_plain_module_has_no_finding() -> None:
    inputs = {"x": numbers(2, 11, WIDTH), "mask": torch.ones(2, 11, dtype=torch.bool)}
    assert check_model(Plain(), inputs).names == ()


def test_a_later_token_is_reported_where_the_model_must_be_causal() -> None:
    x = numbers(1, 11, WIDTH)
    findings = check_model(Plain("leaks"), x, causal=True)
    assert findings.names == ("looks-into-the-future",)
    assert "from 5 on, the output of token 4 moves" in findings["looks-into-the-future"].seen
    assert check_model(Plain("causal"), x, causal=True).names == ()
    unknown = check_model(Plain("leaks"), x)
    assert unknown.names == ()
    assert "pass causal=True" in unknown.not_tested["later tokens"]


def test_a_causal_model_of_transformers_is_known_by_its_layers() -> None:
    class Open(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            ids = kwargs["input_ids"]
            zeros = torch.zeros(ids.shape[0], 1, ids.shape[1], ids.shape[1], dtype=self.dtype)
            return super().forward(*args, attention_mask=zeros, **kwargs)

    findings = check_model(llama(Open), TEXT)
    assert findings.names[0] == "looks-into-the-future"
    assert findings[findings.names[0]].seen.endswith("each of its 2 attention layers has is_causal = True")


def test_positions_that_restart_after_a_cache_are_reported() -> None:
    class Restarts(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            positions = torch.arange(kwargs["input_ids"].shape[1])[None]
            return super().forward(*args, position_ids=positions, **kwargs)

    findings = check_model(llama(Restarts), TEXT)
    assert "decoding-differs" in findings.names
    assert "from token 6 on" in findings["decoding-differs"].seen


def test_positions_that_generate_would_pass_are_no_fault() -> None:
    class Counts(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            if position_ids is None:
                position_ids = torch.arange(kwargs["input_ids"].shape[1])[None]
            return super().forward(*args, position_ids=position_ids, **kwargs)

    findings = check_model(llama(Counts), TEXT)
    assert findings.names == (), str(findings)
    assert "with its cache, token by token: equal to the whole, if position_ids are passed" in findings.understood


def test_implementations_that_differ_are_reported() -> None:
    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for layer in self.model.layers:
                layer.self_attn.scaling = 0.5 if self.config._attn_implementation == "eager" else 0.25
            return super().forward(*args, **kwargs)

    findings = check_model(llama(Scaled), TEXT)
    assert findings.names == ("implementations-differ",)
    assert "eager and sdpa differ by up to" in findings["implementations-differ"].seen


def test_half_precision_that_overflows_is_reported_with_its_module() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
            nn.init.constant_(self.up.bias, 3e4)
            nn.init.uniform_(self.up.weight, 1e4, 5e4)  # columns that differ: a norm of equal ones amplifies rounding

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.up(x.abs()) * 2)

    findings = check_model(Wide(), numbers(2, 5, WIDTH))
    assert findings.names == ("fp16-overflow",)
    assert findings["fp16-overflow"].severity == "fragile"
    assert findings["fp16-overflow"].seen.endswith("the first module with such an output is up")
    assert check_model(Wide().half(), numbers(2, 5, WIDTH).half())["fp16-overflow"].severity == "wrong"


def test_weights_of_all_pairs_are_reported_from_the_length_at_which_they_count() -> None:
    config = transformers.BertConfig(**PLAIN, attn_implementation="eager")
    model = spread(transformers.BertModel(config))
    findings = check_model(model, TEXT, length=4096)
    assert findings.names == ("quadratic-memory",)
    seen = findings["quadratic-memory"].seen
    assert seen.startswith("2 softmaxes return [1, 6, 13, 13] for 13 tokens, on the CPU; at 4096 tokens that is 384")
    assert "pass length=4096" in check_model(model, TEXT, length=1023).not_tested["memory"]
    model.set_attn_implementation("sdpa")
    assert check_model(model, TEXT, length=4096).names == ()


def test_a_batch_of_one_that_fails_is_reported() -> None:
    class Squeezed(Plain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if x.shape[0] == 1 and mask is not None and not bool(mask.all()):
                raise RuntimeError("squeezed")
            return super().forward(x, mask)

    inputs = {"x": numbers(2, 11, WIDTH), "mask": torch.ones(2, 11, dtype=torch.long)}
    findings = check_model(Squeezed(), inputs)
    assert findings.names == ("fails-on-batch-of-one",)
    assert findings["fails-on-batch-of-one"].seen == "x padded on the left: RuntimeError: squeezed"


def test_bits_are_reported_on_request_only() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.finfo(x.dtype).eps * torch.arange(x.shape[0]).view(-1, 1, 1) if len(x) > 1 else 0
            return self.one(x) * (1 + noise)

    inputs = numbers(2, 5, WIDTH)
    plain = check_model(Uneven(), inputs)
    assert plain.names == ()
    assert any(line.startswith("in float32, whatever the place in it: up to") for line in plain.understood)
    assert check_model(Uneven(), inputs, reproducible=True).names == ("batch-variant",)


def test_weights_that_something_reads_are_no_finding() -> None:
    class Reads(nn.Module):
        def __init__(self, use: str) -> None:
            super().__init__()
            self.use = use
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            out, weights = self.attention(x, x, x)
            if self.use == "returned":
                return out, weights
            if self.use == "stored":
                self.latest = weights
                return out
            if self.use == "added":
                assert weights is not None
                return out + weights.amax()
            return out

    x = numbers(2, 7, WIDTH)
    for use in ("returned", "stored", "added"):
        assert check_model(Reads(use), x).names == (), use
    assert check_model(Reads("nothing"), x).names == ("weights-discarded",)


class Convolved(transformers.LlamaForCausalLM):
    """Adds the output of the token before, past every mask."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        logits: Any = result.logits
        result.logits = logits + logits.roll(1, 1) * (torch.arange(logits.shape[1]) > 0)[:, None]
        return result


def test_documents_of_layers_with_a_state_mix() -> None:
    findings = check_model(llama(Convolved), TEXT)
    assert "documents-mixed" in findings.names
    assert "has an effect, but not in every layer" in findings["documents-mixed"].seen


def test_what_breaks_under_a_condition_is_fragile_and_states_it() -> None:
    """Packed documents and a dtype are conditions, unless the inputs hold such a mask or the model has that dtype."""
    findings = check_model(*build_faulty("automodel"))
    finding = findings["mask-4d-ignored"]
    assert (finding.severity, finding.condition.split(",")[0]) == (
        "fragile",
        "several documents are packed into one row",
    )
    assert not findings
    packed = check_model(llama(Convolved), {**TEXT, "attention_mask": torch.zeros(2, 1, 13, 13)})
    assert (packed["documents-mixed"].severity, packed["documents-mixed"].condition) == ("wrong", "")
    assert any(
        line.startswith("inputs holds a mask over pairs of tokens, attention_mask;") for line in packed.understood
    )
    for name, entry in MODEL_CATALOGUE.items():
        assert entry.condition or entry.severity != "fragile", name
        assert not entry.condition.endswith("."), name


# ---------------------------------------------------------------- rounding


def test_what_counts_lies_between_rounding_and_the_output() -> None:
    """A difference of 1e-6 counts in float64, where rounding is 1e-15; float32 inside the model does not hide it."""

    class Off(Plain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            out = super().forward(x, mask)
            return out.float().to(x.dtype) * (1 + (1e-6 if x.shape[0] > 1 else 0))

    assert check_model(Off(), numbers(2, 7, WIDTH)).names == ("batch-changes-output",)

    class Rounds(Plain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, mask).float().to(x.dtype) * (1 + (1e-13 if x.shape[0] > 1 else 0))

    assert check_model(Rounds(), numbers(2, 7, WIDTH)).names == ()


def test_a_model_that_does_not_run_in_float64_is_compared_in_float32() -> None:
    class Single(Plain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if x.dtype == torch.float64:
                raise RuntimeError("no kernel for double")
            return super().forward(x, mask)

    findings = check_model(Single(), numbers(2, 7, WIDTH))
    assert findings.names == ()
    assert findings.understood[0].endswith("in float32")


# ---------------------------------------------------------------- state and arguments


def fingerprint(model: nn.Module) -> list[Any]:
    return [(name, tensor.dtype, tensor.clone()) for name, tensor in model.state_dict().items()]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_and_the_random_state_do_not_change(fails: bool) -> None:
    class Drawing(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            python_random.random()
            np.random.seed(3)
            return super().forward(*args, **kwargs)

    model = llama(Drawing).train()
    model.model.layers[0].eval()
    before, modes = fingerprint(model), [module.training for module in model.modules()]
    implementation, random = model.config._attn_implementation, torch.get_rng_state()
    others = python_random.getstate(), np.random.get_state()[1].tolist()
    inputs: Any = {"input_ids": IDS * 1000 if fails else IDS.clone()}
    copied = copy.deepcopy(inputs)
    if fails:
        with pytest.raises(CheckError, match="fails in float64"):
            check_model(model, inputs)
    else:
        check_model(model, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert (python_random.getstate(), np.random.get_state()[1].tolist()) == others
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == implementation
    for (name, dtype, tensor), (other, kind, value) in zip(before, fingerprint(model), strict=True):
        assert (name, dtype) == (other, kind)
        assert torch.equal(tensor, value)
    assert torch.equal(inputs["input_ids"], copied["input_ids"])
    assert all(not module._forward_hooks for module in model.modules())


def test_tied_weights_of_the_copy_stay_tied_and_integers_stay_integers() -> None:
    model = llama(tie_word_embeddings=True)
    copied: Any = copy_model(model, torch.float64)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.lm_head.weight.dtype == torch.float64
    assert model.lm_head.weight.dtype == torch.float32
    module = nn.Module()
    module.register_buffer("counts", torch.arange(3))
    assert copy_model(module, torch.float64).counts.dtype == torch.int64


def test_padding_of_the_inputs_is_removed_first() -> None:
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    mask[1, 11:] = 0
    findings = check_model(llama(), {"input_ids": IDS, "attention_mask": mask})
    assert findings.names == ()
    assert findings.understood[0].startswith("called as model(input_ids [1, 11], attention_mask [1, 11])")


def test_inputs_of_every_form() -> None:
    x, model = numbers(2, 7, WIDTH), Plain()
    one = check_model(model, x).understood
    assert one == check_model(model, (x,)).understood == check_model(model, {"x": x}).understood
    called = check_model(model, {"x": x}, call=lambda model, x: {"out": model(x)}).understood
    assert called == one


def test_a_model_with_the_length_first_is_called_through_a_function() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 19)
    x = numbers(2, 7, WIDTH)
    assert check_model(layer, x).names == ("batch-changes-output",), "its first axis is the length"
    called = check_model(layer, x, call=lambda model, src: model(src.transpose(0, 1)).transpose(0, 1))
    assert called.names == ()


def test_a_padding_mask_of_torch_hides_where_it_is_true() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 19, batch_first=True)
    inputs = {"src": numbers(2, 11, WIDTH), "src_key_padding_mask": torch.zeros(2, 11, dtype=torch.bool)}
    findings = check_model(layer, inputs)
    assert findings.names == (), str(findings)
    assert "padding" not in findings.not_tested


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(TypeError, match=r"model: got function, expected an nn\.Module"):
        check_model(numbers, IDS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="inputs: got str, expected a dict of arguments, a tensor or a tuple"):
        check_model(Plain(), "text")
    with pytest.raises(ValueError, match="inputs: got no tensor with a batch axis"):
        check_model(Plain(), {"x": 3})
    with pytest.raises(CheckError, match=r"the call with \(x \[1, 7, 5\]\) fails in float64: RuntimeError"):
        check_model(Plain(), numbers(2, 7, 5))
    with pytest.raises(CheckError, match="on the meta device"):
        check_model(Plain().to("meta"), numbers(2, 7, WIDTH))


def test_an_error_in_one_question_leaves_the_others() -> None:
    class Narrow(Plain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if x.shape[0] == 3:
                raise SystemExit("no batch of three")
            return super().forward(x, mask)

    findings = check_model(Narrow(), numbers(2, 7, WIDTH))
    assert findings.names == ()
    assert findings.not_tested["batch size and place"] == "a batch of three: SystemExit: no batch of three"


# ---------------------------------------------------------------- texts


def test_every_finding_of_a_model_has_whole_words_and_is_tested() -> None:
    for name, words in MODEL_CATALOGUE.items():
        assert words.why.endswith("."), name
        assert words.fix.endswith("."), name
        assert len(words.code) <= 100, name
    names = {*EXPLAINS, *(other for others in EXPLAINS.values() for other in others)}
    assert names <= MODEL_CATALOGUE.keys()
    elsewhere = {
        *("fails-on-batch-of-one", "looks-into-the-future", "decoding-differs", "implementations-differ"),
        *("fp16-overflow", "quadratic-memory", "batch-variant", "documents-mixed"),
        "chunked-prefill-differs",  # Mamba, in test_check_model_families.py
        *("place-variant", "bf16-overflow"),  # the same code as their neighbours
    }
    assert {*FAULTS.values(), *PLAIN_FAULTS.values(), *elsewhere} == MODEL_CATALOGUE.keys()


def test_the_page_lists_every_finding_of_a_model() -> None:
    page = (Path(DOCS) / "guides" / "check_model.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([a-z0-9-]+)` \| (wrong|fragile|unusual|slow) \|", page, re.MULTILINE))
    assert listed == {name: words.severity for name, words in MODEL_CATALOGUE.items()}


def test_findings_are_written_as_those_of_check() -> None:
    findings = check_model(*build_faulty("automodel"))
    assert json.loads(findings.to_json())["findings"][0]["name"] == "mask-4d-ignored"
    assert str(findings).splitlines()[0] == "TextModel: 1 fragile"
    assert isinstance(build_faulty("automodel")[0], TextModel)
