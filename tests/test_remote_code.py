"""Python code that comes with a target: run by --trust-remote-code alone, and never wrong in silence."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM, dynamic_module_utils

from secondguess import LLM, SamplingParams
from secondguess.cli import COMMANDS, main, parser_of
from secondguess.errors import UserError
from secondguess.prepare.chat import load_chat
from secondguess.target.hf import GenericDecoder, HFTarget
from secondguess.target.load import load_target
from secondguess.train.config import load_config
from tiny_folder import save_tiny

MODEL = """\
from pathlib import Path
from transformers import LlamaForCausalLM

Path({ran!r}).touch()


class OwnForCausalLM(LlamaForCausalLM):
    pass
"""
TOKENIZER = """\
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({ran!r}).touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
CONFIG = """\
from transformers import PreTrainedConfig


class OwnConfig(PreTrainedConfig):
    model_type = "own"
"""
PARAMS = SamplingParams(max_tokens=12, seed=3, temperature=1.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies a model's code here before it runs it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # which it adds that folder to
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target whose model comes with code, which leaves a file when it runs. There is a class for it without, too."""
    target = save_tiny(tmp_path) / "target"
    (target / "modeling_own.py").write_text(MODEL.format(ran=str(tmp_path / "model ran")))
    change(target / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    return tmp_path


@pytest.fixture
def needy(folder: Path) -> Path:
    """Its tokenizer has code, too, and there is no class for it without."""
    target = folder / "target"
    (target / "tokenization_own.py").write_text(TOKENIZER.format(ran=str(folder / "tokenizer ran")))
    own = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    change(target / "tokenizer_config.json", auto_map=own, tokenizer_class="OwnTokenizer")
    return folder


def what_ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("* ran"))


def test_without_the_flag_no_code_is_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        target = load_target(str(folder / "target"))
    assert what_ran(folder) == []
    assert type(target.model) is LlamaForCausalLM
    assert "not run without --trust-remote-code" in caplog.text


def test_with_the_flag_it_is_run_and_writes_the_same(folder: Path) -> None:
    without = LLM(folder / "target", folder / "drafters" / "pr").generate("hello", PARAMS)[0]
    llm = LLM(folder / "target", folder / "drafters" / "pr", trust_remote_code=True)
    assert what_ran(folder) == ["model ran"]
    assert type(llm.target.model).__name__ == "OwnForCausalLM"
    assert isinstance(llm.target._body.decoder, GenericDecoder)  # ours would not run what it may have changed
    assert llm.generate("hello", PARAMS)[0].text == without.text


@pytest.mark.parametrize("read", [load_target, load_chat])
@pytest.mark.parametrize("own_config", [False, True])
def test_what_needs_code_names_the_flag(needy: Path, read: Any, own_config: bool) -> None:
    if own_config:
        (needy / "target" / "configuration_own.py").write_text(CONFIG)
        own = {"AutoConfig": "configuration_own.OwnConfig"}
        change(needy / "target" / "config.json", model_type="own", auto_map=own)
    with pytest.raises(UserError, match="only --trust-remote-code lets run") as caught:
        read(str(needy / "target"))
    assert "\n" not in str(caught.value)
    assert what_ran(needy) == []
    assert not (needy / "modules").exists()


def test_a_conversation_without_the_weights(needy: Path) -> None:
    load_chat(str(needy / "target"), trust_remote_code=True)
    assert what_ran(needy) == ["tokenizer ran"]


def test_an_own_kind_of_model_is_still_refused(folder: Path) -> None:
    """Trusted code may run; that does not make its model one that we know."""
    (folder / "target" / "configuration_own.py").write_text(CONFIG)
    own = {"AutoConfig": "configuration_own.OwnConfig"}
    change(folder / "target" / "config.json", model_type="own", auto_map=own)
    with pytest.raises(UserError, match="model type 'own' is not supported"):
        load_target(str(folder / "target"), trust_remote_code=True)


class Deaf(LlamaForCausalLM):
    """Its attention is its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def test_code_that_attends_by_itself_is_found_out(tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path) / "target").config
    llm = LLM(HFTarget(Deaf(config).float()), method="ar", max_model_len=32)
    with pytest.raises(UserError, match="does not call transformers' attention functions"):
        llm.generate([1, 2, 3], PARAMS)


# The flag


def test_every_command_with_a_target_has_it() -> None:
    for name in COMMANDS:
        parser, _ = parser_of(name)
        words = {word for action in parser._actions for word in (action.dest, *action.option_strings)}
        if "target" in words:
            assert "--trust-remote-code" in words, name
    assert load_config(None, ["responses=r", "out=o", "trust_remote_code=true"]).trust_remote_code


@pytest.mark.parametrize("flags", [(), ("--trust-remote-code",)])
def test_a_command_hands_it_on(needy: Path, flags: tuple[str, ...]) -> None:
    command = ["generate", str(needy / "target"), "hi", "--method", "ar", "--max-new-tokens", "2", *flags]
    assert main(command) == (0 if flags else 2)
    assert bool(what_ran(needy)) == bool(flags)


def test_a_server_has_it(needy: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("prometheus_client")
    from secondguess.commands.serve import make
    from secondguess.config import TreeConfig
    from secondguess.methods import parse_method
    from secondguess.server.settings import Settings

    parser, _ = parser_of("serve")
    flags = ["--method", "ar", "--max-model-len", "64", "--trust-remote-code"]
    args = parser.parse([str(needy / "target"), *flags])
    make(args, parse_method("ar", TreeConfig()), TreeConfig(), Settings())
    assert what_ran(needy) == ["model ran", "tokenizer ran"]
