"""What our plug-in needs of SGLang, against the released source: a snapshot of signatures, and the wheel where it is.

``make sglang`` fetches the wheel. After a change of ``HOOKS`` or ``RELEASE``, this writes the snapshot:

    python tests/test_sglang_hooks.py > tests/sglang_signatures.json
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fake_sglang
from secondguess.errors import UserError
from secondguess.integrations import sglang as plugin
from secondguess.integrations.sglang.arguments import check_arguments, fill_arguments, method_of
from secondguess.integrations.sglang.hooks import HOOKS, RELEASE, Hook, complaints, source_of
from secondguess.integrations.sglang.signatures import (
    Signature,
    attributes_read,
    base_signature,
    keywords_passed,
    signature,
)

ROOT = Path(__file__).parent.parent
SNAPSHOT = Path(__file__).with_name("sglang_signatures.json")
WHEELS = [*(ROOT / "build" / "sglang").glob(f"sglang-{RELEASE}-*.whl")]


def key(hook: Hook) -> str:
    return f"{hook.module}:{hook.name}"


def snapshot_of(root: Any) -> dict[str, str]:
    """By hook the names that matter to it, those required with a star."""
    found = {"release": RELEASE}
    for hook in HOOKS:
        known = source_of(root)(hook)
        assert known, key(hook)
        required = () if hook.use == "read" else known.required
        matter = known.names if hook.use in ("overridden", "passes") else (*hook.names, *required)
        found[key(hook)] = " ".join(name + "*" * (name in required) for name in known.names if name in matter)
    return found


def signature_in(text: str) -> Signature:
    """The inverse."""
    words = text.split()
    return Signature(tuple(w.rstrip("*") for w in words), tuple(w[:-1] for w in words if w.endswith("*")))


def test_the_snapshot_has_what_is_needed() -> None:
    found = json.loads(SNAPSHOT.read_text())
    assert found.pop("release") == RELEASE
    assert found.keys() == {key(hook) for hook in HOOKS}
    assert list(complaints(lambda hook: signature_in(found[key(hook)]))) == []


@pytest.mark.skipif(not WHEELS, reason=f"SGLang's wheel is not in build/sglang: 'make sglang' fetches {RELEASE}")
def test_the_snapshot_is_that_of_the_released_wheel() -> None:
    assert snapshot_of(zipfile.Path(WHEELS[0])) == json.loads(SNAPSHOT.read_text())


SOURCE = """
class Base:
    LIMIT = 3
    kept: int

    def __init__(self, size, *, page_size=1):
        self.size = size

    @property
    def verify_mask(self): ...

    async def run(self, batch, first=None, *, topk, more=0): ...

@dataclass
class Input:
    tokens: Tensor
    mask: Tensor = field()
    seen: list = field(default_factory=list)
    steps: int = 0

def load(cls, path): ...

class Worker(ABC):
    @property
    def target(self):
        return self._target.model

    @abstractmethod
    def draft(self): ...

    @abc.abstractmethod
    async def extend(self): ...

    def make(self, kind):
        given = dict(size=1, device=self.device)
        return kind(**given, seed=2)
"""


@pytest.mark.parametrize(
    ("name", "names", "required"),
    [
        ("Base", "LIMIT kept __init__ size verify_mask run", "kept"),
        ("Base.__init__", "size page_size", "size"),
        ("Base.run", "batch first topk more", "batch topk"),
        ("Input", "tokens mask seen steps", "tokens mask"),
        ("load", "path", "path"),
    ],
)
def test_signatures_are_read_from_text(name: str, names: str, required: str) -> None:
    found = signature(SOURCE, name)
    assert found
    assert (found.names, found.required) == (tuple(names.split()), tuple(required.split()))


def test_what_is_read_of_an_object_and_passed_to_others() -> None:
    assert attributes_read(SOURCE, "Worker.target") == Signature(("_target",))
    assert attributes_read(SOURCE, "Worker.make") == Signature(("device",))
    assert keywords_passed(SOURCE, "Worker.make") == Signature(("size", "device", "seed"))
    assert base_signature(SOURCE, "Worker") == Signature(("target", "draft", "extend", "make"), ("draft", "extend"))


@pytest.mark.parametrize("look", [signature, base_signature, attributes_read, keywords_passed])
@pytest.mark.parametrize("name", ["nothing", "Base.nothing", "load.path"])
def test_what_is_not_there_has_no_signature(name: str, look: Any) -> None:
    assert look(SOURCE, name) is None


def test_complaints_name_what_differs() -> None:
    found = Signature(("batch", "topk", "pages"), ("batch", "pages"))
    called = Hook("called", "sglang.verify", "run", ("batch", "topk", "device"))
    assert called.complaint(found) == "run (sglang.verify) no longer takes device and now takes pages"
    assert Hook("called", "sglang.verify", "run", ("batch", "topk", "pages")).complaint(found) == ""
    assert Hook("called", "sglang.verify", "run", ("batch", "pages")).complaint(found) == ""
    overridden = Hook("overridden", "sglang.verify", "run", ("batch", "pages"))
    assert overridden.complaint(found) == "run (sglang.verify) now takes topk"
    assert Hook("read", "sglang.verify", "Run", ("topk",)).complaint(found) == ""
    assert Hook("read", "sglang.verify", "Run", ("x",)).complaint(found) == "Run (sglang.verify) no longer has x"
    derived = Hook("derived", "sglang.verify", "Base", ("batch",))
    assert derived.complaint(found) == "Base (sglang.verify) now has pages", "a new abstract method"
    assert Hook("reads", "sglang.verify", "Base.run", ("x",)).complaint(found).endswith("no longer reads x")
    assert Hook("passes", "sglang.verify", "run", ("batch", "pages")).complaint(found).endswith("now passes topk")
    assert called.complaint(None) == "sglang.verify has no run"


# Loading it ----------------------------------------------------------------------------------------------------------


def write_source(root: Path, drop: str = "") -> None:
    """A package ``sglang`` with all hooks but the parameter or attribute ``drop``, as source that nobody imports."""
    bodies: dict[tuple[str, str], list[str]] = {}
    for hook in HOOKS:
        names, (owner, _, last) = [name for name in hook.names if name != drop], hook.name.rpartition(".")
        is_class = last[0].isupper()
        attributes, keywords = "".join(f"self.{name}, " for name in names), ", ".join(f"{name}=0" for name in names)
        body = {"reads": f"return ({attributes})", "passes": f"made({keywords})"}
        takes = ["self"] if hook.use in body else names
        method = f"def {last}({', '.join(takes)}): {body.get(hook.use, '...')}"
        lines = [f"{name}: int = 0" for name in names] if is_class else [method]
        bodies.setdefault((hook.file, last if is_class else owner), []).extend(lines)
    for (file, owner), lines in bodies.items():
        path, indent = root / file, "    " * bool(owner)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as source:
            source.write(f"class {owner}:\n    x = 0\n" * bool(owner))
            source.writelines(f"{indent}{line}\n" for line in lines)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, ModuleType]]:
    """Modules of SGLang's names, of which ``sglang`` is found in ``tmp_path``."""
    modules = fake_sglang.packages()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / name / "__init__.py")))
    fake_sglang.SpeculativeAlgorithm.known.clear()
    name = "secondguess.integrations.sglang.algorithm"
    sys.modules.pop(name, None)
    yield modules
    sys.modules.pop(name, None)


def test_it_registers_where_all_hooks_are(tmp_path: Path, stand_in: dict[str, ModuleType]) -> None:
    write_source(tmp_path)
    plugin.register()
    algorithm: Any = fake_sglang.SpeculativeAlgorithm.known["PR"]
    assert algorithm.is_eagle()
    assert algorithm.is_eagle3()
    assert not algorithm.has_draft_kv()
    assert not algorithm.supports_overlap
    assert algorithm.create_future_map("cuda", "pool", needs_cpu_seq_lens=True) == (algorithm, "cuda", "pool")
    assert algorithm.check is check_arguments


@pytest.mark.parametrize("name", ["topk", "bonus_tokens", "gpu_id", "verify_mask", "_draft_worker", "enable_hisparse"])
def test_it_says_in_one_line_what_differs(
    name: str, tmp_path: Path, stand_in: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    write_source(tmp_path, drop=name)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    [said] = caplog.messages
    assert f"made for SGLang {RELEASE} and is not loaded" in said
    assert name in said
    assert "\n" not in said
    assert fake_sglang.SpeculativeAlgorithm.known == {}


def test_where_there_is_no_source_it_says_so(
    stand_in: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for found in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(plugin, "find_spec", lambda name, found=found: found)
        plugin.register()
    assert [said.endswith("its source is not to be found") for said in caplog.messages] == [True, True]


def test_sglang_finds_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(_, value)] = project["entry-points"]["sglang.srt.plugins"].items()
    module, _, name = value.partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


# SGLang's arguments --------------------------------------------------------------------------------------------------


def arguments(**changes: Any) -> SimpleNamespace:
    given = {
        "device": "cuda",
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "enable_dp_attention": False,
        "disaggregation_mode": "null",
        "enable_hierarchical_cache": False,
        "enable_unified_memory": False,
        "enable_hisparse": False,
        "enable_lmcache": False,
        "enable_flexkv": False,
        "enable_unified_cache_external_linker": False,
        "radix_cache_backend": None,
        "disaggregation_decode_retraction_backup": None,
        "enable_pdmux": False,
        "enable_two_batch_overlap": False,
        "speculative_adaptive": False,
        "speculative_use_rejection_sampling": False,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_token_map": None,
        "speculative_draft_load_format": None,
        "speculative_draft_attention_backend": None,
        "speculative_draft_model_path": "drafter",
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "attention_backend": "fa3",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "max_running_requests": None,
    }
    return SimpleNamespace(**given | changes)


def test_arguments_are_filled_in(caplog: pytest.LogCaptureFixture) -> None:
    check_arguments(arguments())
    filled = arguments()
    fill_arguments(filled)
    said = "PR: method pr, 49 draft tokens with the root in 8 steps, at most 48 requests; no overlap, no mixed chunks"
    assert caplog.messages == [said]
    assert (filled.speculative_num_steps, filled.speculative_num_draft_tokens) == (8, 49)
    assert filled.speculative_eagle_topk == 2
    assert filled.disable_overlap_schedule is True
    assert filled.enable_mixed_chunk is False
    assert filled.max_running_requests == 48
    given = arguments(speculative_num_steps=4, speculative_num_draft_tokens=13, max_running_requests=7)
    fill_arguments(given)
    assert (given.speculative_num_steps, given.speculative_num_draft_tokens, given.max_running_requests) == (4, 13, 7)


def test_settings_come_from_the_method_and_from_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDGUESS_METHOD", "pr:budget=24,m=2,offer_width=4")
    filled = arguments(speculative_num_draft_tokens=25, speculative_num_steps=5)
    fill_arguments(filled)
    assert (filled.speculative_num_draft_tokens, filled.speculative_num_steps) == (25, 5)
    tree = method_of(filled.speculative_num_steps, filled.speculative_num_draft_tokens).tree
    assert (tree.budget, tree.num_steps, tree.num_reconsider, tree.offer_width) == (24, 5, 2, 4)


@pytest.mark.parametrize(
    ("steps", "nodes", "said"),
    [
        (None, 13, "--speculative-num-draft-tokens is 13, and SECONDGUESS_METHOD makes it 25: leave one of them out"),
        (8, None, "--speculative-num-steps is 8, and SECONDGUESS_METHOD makes it 5: leave one of them out"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    steps: int | None, nodes: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECONDGUESS_METHOD", "pr:budget=24,num_steps=5")
    with pytest.raises(UserError, match=said):
        method_of(steps, nodes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 2}, "PR needs --tp-size to be 1, got 2: the drafter wants the whole embedding"),
        ({"device": "cpu"}, "--device to be 'cuda'"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode to be 'null'"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache to be False"),
        ({"speculative_draft_model_path": None}, "needs --speculative-draft-model-path"),
        ({"speculative_eagle_topk": 6}, "leave --speculative-eagle-topk out"),
        ({"attention_backend": "trtllm_mha"}, "must be flashinfer, fa3, triton for PR, got trtllm_mha to prefill"),
        ({"prefill_attention_backend": "fa4"}, "got fa4 to prefill: others do not read the tree's mask"),
        ({"decode_attention_backend": "flashmla"}, "got flashmla to decode"),
        ({"enable_lmcache": True}, "--enable-lmcache to be False"),
        ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker to be False"),
        ({"disaggregation_decode_retraction_backup": "host_pool"}, "decode-retraction-backup not to be 'host_pool'"),
        ({"speculative_accept_threshold_acc": 0.9}, "--speculative-accept-threshold-acc to be 1.0, got 0.9"),
        ({"speculative_token_map": "map.pt"}, "--speculative-token-map to be None, got 'map.pt': it is for drafts of"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_arguments(arguments(**changes))


def test_backends_of_both_kinds_stand_in_for_the_one_of_all() -> None:
    both = {"prefill_attention_backend": "fa3", "decode_attention_backend": "triton"}
    check_arguments(arguments(attention_backend="fa4", **both))


def test_amds_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their device is "cuda", too, and there SGLang takes the best token whatever the temperature."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(UserError, match="on AMD SGLang verifies as if temperature were 0"):
        check_arguments(arguments())


def test_places_that_would_grow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    with pytest.raises(UserError, match="unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"):
        check_arguments(arguments())


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("ngram", "must be eagle3.1 or pr or hass"),
        ("pr:budget=auto", "with a budget that is a number"),
        ("pr:coupled=true", "coupled needs our noise"),
        ("pr:merge=append", "siblings of distinct tokens"),
        ("pr:drafter=other", "SGLang names the drafter, with --speculative-draft-model-path"),
        ("pr:budget=4", "a tree of 4 nodes cannot be 8 deep"),
        ("prr", "unknown method 'prr'"),
    ],
)
def test_methods_that_sglang_cannot_serve_are_refused(method: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDGUESS_METHOD", method)
    with pytest.raises(UserError, match=said):
        method_of(None, None)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(snapshot_of(zipfile.Path(WHEELS[0])), indent=1) + "\n")
