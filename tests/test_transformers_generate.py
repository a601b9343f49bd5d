"""``custom_generate``: the tokens of transformers' own ``generate``; what it cannot honour is named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, NoRepeatNGramLogitsProcessor, dynamic_module_utils

from secondguess.drafter.checkpoint import save_drafter
from secondguess.errors import UserError
from secondguess.integrations.transformers import FOLDER, decode
from secondguess.integrations.transformers.ready import llm_for
from secondguess.target.fingerprint import glance
from secondguess.testing import tiny_drafter, tiny_target
from secondguess.types import SamplingParams

PROMPT = torch.tensor([[5, 9, 2, 7, 11, 30, 4]])
# Left-padded with token 0, which also ends texts, so the mask is needed.
PADDED = {
    "input_ids": torch.tensor([[0, 0, 8, 3, 17], [5, 9, 2, 7, 1], [0, 6, 6, 6, 23]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]),
}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    save_drafter(tiny_drafter(tiny_target("llama")), folder, {})
    return folder


@pytest.fixture
def model(tmp_path):
    """A user's own model: the weights of the tiny target, as transformers loads them."""
    tiny_target("llama", dtype=torch.float64).model.save_pretrained(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)


OPTIONS = [
    {"max_new_tokens": 24},
    {},  # 20 new tokens
    {"max_length": 15},
    {"max_new_tokens": 24, "eos_token_id": [3, 7, 12, 40]},
    {"max_new_tokens": 24, "eos_token_id": [3, 7, 12, 40], "min_new_tokens": 9},
    {"max_new_tokens": 24, "eos_token_id": [3, 7, 12, 40], "min_length": 14, "pad_token_id": 63},
    {"max_new_tokens": 24, "eos_token_id": None},
    {"max_new_tokens": 24, "repetition_penalty": 1.3},
    {"generation_config": GenerationConfig(max_new_tokens=9, eos_token_id=0)},
    {"max_new_tokens": 12, "do_sample": True, "top_k": 1},  # one token is left: the law is the choice
    {"max_new_tokens": 12, "do_sample": True, "temperature": 1e-4, "min_p": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("inputs", [{"input_ids": PROMPT}, PADDED], ids=["one", "padded"])
def test_same_tokens_as_plain_generate(model, drafter, inputs, options) -> None:
    plain = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, custom_generate=decode, drafter=drafter)
    assert ours.dtype == plain.dtype
    assert torch.equal(ours, plain)


def test_an_end_token_that_comes_early_is_held_back(model, drafter) -> None:
    plain, lengths = model.generate(PROMPT, max_new_tokens=24), []
    end = int(plain[0, PROMPT.shape[1] + 1])
    for least in ({}, {"min_new_tokens": 9}, {"min_length": 14}):
        options = {"max_new_tokens": 24, "eos_token_id": end, **least}
        wanted = model.generate(PROMPT, **options)
        assert torch.equal(model.generate(PROMPT, **options, custom_generate=decode, drafter=drafter), wanted)
        lengths.append(wanted.shape[1])
    assert lengths[0] < min(lengths[1:])


def test_a_folder_does_the_same_and_streams(model, drafter, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # which it adds that folder to
    put: list[int] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            put.extend(value.flatten().tolist())

        def end(self) -> None:
            put.append(-1)

    settings = {"max_new_tokens": 24, "drafter": drafter, "custom_generate": FOLDER, "trust_remote_code": True}
    ours = model.generate(PROMPT, **settings, method="pr:budget=8", streamer=Streamer())
    plain = model.generate(PROMPT, max_new_tokens=24)
    assert torch.equal(ours, plain)
    assert put == [*plain[0].tolist(), -1]
    for name, value in (("assistant_model", model), ("stop_strings", ["x"])):
        with pytest.raises(UserError, match=f"not supported by secondguess's custom_generate: {name}"):
            model.generate(PROMPT, **settings, **{name: value})


def test_the_model_stays_its_owners(model, drafter) -> None:
    """Its modules, its gradients and its mode are as before, and a weight that has changed since is seen."""
    model.train()
    names = [(name, type(module)) for name, module in model.named_modules()]
    ours = model.generate(PROMPT, max_new_tokens=12, custom_generate=decode, drafter=drafter)
    assert [(name, type(module)) for name, module in model.named_modules()] == names
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        model.model.layers[3].self_attn.q_proj.weight.neg_()  # the engine has joined it with others, in a copy
        model.model.norm.weight[::2] = -3.0
    changed = model.generate(PROMPT, max_new_tokens=12, custom_generate=decode, drafter=drafter)
    assert torch.equal(changed, model.generate(PROMPT, max_new_tokens=12))
    assert not torch.equal(changed, ours)
    model.model.layers[3].mlp.down_proj.weight.data.mul_(-2.0)  # as adapters are merged: no version is counted
    again = model.generate(PROMPT, max_new_tokens=12, custom_generate=decode, drafter=drafter)
    assert torch.equal(again, model.generate(PROMPT, max_new_tokens=12))
    assert not torch.equal(again, changed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_glance_sees_any_value_change(dtype: torch.dtype) -> None:
    for start, stop in ((0, 8), (0, 7), (1, 8), (3, 4)):  # of any length, from any place of their storage
        weight = torch.nn.Parameter(torch.ones(8, dtype=dtype)[start:stop])
        before = glance(weight)
        for i in range(stop - start):
            weight.data[i] += 0.5
            assert glance(weight) != before
            weight.data[i] -= 0.5
        assert glance(weight) == before


def test_engines_are_kept_between_calls(model, drafter) -> None:
    first = llm_for(model, drafter, "pr", 3, 40)
    assert llm_for(model, drafter, "pr", 1, 30) is first
    longer = llm_for(model, drafter, "pr", 3, 65)
    assert longer is not first
    assert longer.target is first.target
    assert llm_for(model, drafter, "eagle3.1", 1, 30).target is first.target


def test_a_conversation_that_grows_seldom_takes_a_new_engine(model, drafter) -> None:
    """The target takes 1024 tokens; nobody takes more, and that is said of the length that was asked for."""
    lengths = [*range(33, 65, 7), *range(65, 129, 9), 1000, 1024]
    engines = [llm_for(model, drafter, "pr", 3, length) for length in lengths]
    assert len({id(llm) for llm in engines}) == 3
    assert (engines[0].max_batch_size, engines[0].max_model_len) == (4, 64)
    assert engines[-1].max_model_len == 1024
    with pytest.raises(UserError, match="got 1025"):
        llm_for(model, drafter, "pr", 1, 1025)


def test_this_is_the_release_that_the_plug_in_was_read_beside() -> None:
    """It rests on names of transformers that are no interface: of another release, look at them first."""
    constraints = (Path(__file__).parent.parent / "constraints.txt").read_text()
    [tested] = re.findall(r"^transformers==(.*)$", constraints, re.M)
    look = "see what changed in transformers.generation (processors, criteria, _pad_token_tensor, custom_generate)"
    assert transformers.__version__ == tested, f"options.py and decode.py were tested with {tested}: {look}"


def test_samples_are_repeated_by_torchs_seed_and_are_the_engines(model, drafter) -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        options = {"max_new_tokens": 30, "do_sample": True, "num_return_sequences": 3, "top_k": 20}
        return model.generate(PROMPT, **options, custom_generate=decode, drafter=drafter)

    drawn = draw()
    assert torch.equal(drawn, draw())
    assert len({tuple(row) for row in drawn.tolist()}) == 3
    torch.manual_seed(3)
    seed = int(torch.randint(2**62, (3,))[0])
    params = SamplingParams(temperature=1.0, top_k=20, seed=seed, max_tokens=30)
    (output,) = llm_for(model, drafter, "pr", 1, 40).generate([PROMPT[0].tolist()], params)
    assert drawn[0, 7 : 7 + len(output.token_ids)].tolist() == list(output.token_ids)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"bad_words_ids": [[3]]}, "NoBadWordsLogitsProcessor"),
        ({"do_sample": True, "typical_p": 0.9}, "TypicalLogitsWarper"),
        ({"do_sample": True, "min_p": 0.1, "top_p": 0.9}, "min_p together with top_p"),
        ({"logits_processor": [NoRepeatNGramLogitsProcessor(2)]}, "NoRepeatNGramLogitsProcessor"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [1, 2]}, "PrefixConstrainedLogitsProcessor"),
        ({"max_time": 1.0}, "MaxTimeCriteria"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_named(model, drafter, options, named) -> None:
    with pytest.raises(UserError, match=f"not supported by secondguess's custom_generate: .*{named}"):
        model.generate(PROMPT, **options, custom_generate=decode, drafter=drafter)
