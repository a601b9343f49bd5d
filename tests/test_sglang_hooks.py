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

import fake_sglang
from secondguess.errors import UserError
from secondguess.integrations import sglang as plugin
from secondguess.integrations.sglang.arguments import check_arguments, fill_arguments, method_of
from secondguess.integrations.sglang.hooks import HOOKS, RELEASE, Hook, complaints, source_of
from secondguess.integrations.sglang.signatures import Signature, signature

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
        matter = known.names if hook.use == "overridden" else (*hook.names, *required)
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


@pytest.mark.parametrize("name", ["nothing", "Base.nothing", "load.path"])
def test_what_is_not_there_has_no_signature(name: str) -> None:
    assert signature(SOURCE, name) is None


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
    assert called.complaint(None) == "sglang.verify has no run"


# Loading it ----------------------------------------------------------------------------------------------------------


def write_source(root: Path, drop: str = "") -> None:
    """A package ``sglang`` with all hooks but the parameter or attribute ``drop``, as source that nobody imports."""
    bodies: dict[tuple[str, str], list[str]] = {}
    for hook in HOOKS:
        names, (owner, _, last) = [name for name in hook.names if name != drop], hook.name.rpartition(".")
        is_class = last[0].isupper()
        lines = [f"{name}: int = 0" for name in names] if is_class else [f"def {last}({', '.join(names)}): ..."]
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


@pytest.mark.parametrize("name", ["topk", "bonus_tokens", "grammar_barrier", "verify_mask", "enable_hisparse"])
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
        "enable_pdmux": False,
        "enable_two_batch_overlap": False,
        "speculative_adaptive": False,
        "speculative_use_rejection_sampling": False,
        "speculative_draft_model_path": "drafter",
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "attention_backend": "fa3",
        "page_size": None,
        "max_running_requests": None,
    }
    return SimpleNamespace(**given | changes)


def test_arguments_are_filled_in() -> None:
    check_arguments(arguments())
    filled = arguments()
    fill_arguments(filled)
    assert (filled.speculative_num_steps, filled.speculative_num_draft_tokens) == (8, 49)
    assert filled.speculative_eagle_topk == 2
    assert filled.disable_overlap_schedule is True
    assert filled.enable_mixed_chunk is False
    assert filled.max_running_requests == 48
    given = arguments(speculative_num_steps=4, speculative_num_draft_tokens=13, max_running_requests=7)
    fill_arguments(given)
    assert (given.speculative_num_steps, given.speculative_num_draft_tokens, given.max_running_requests) == (4, 13, 7)


def test_the_methods_settings_come_before_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDGUESS_METHOD", "pr:budget=24,m=2,offer_width=4")
    filled = arguments(speculative_num_draft_tokens=13, speculative_num_steps=5)
    fill_arguments(filled)
    assert (filled.speculative_num_draft_tokens, filled.speculative_num_steps) == (25, 5)
    tree = method_of(filled.speculative_num_steps, filled.speculative_num_draft_tokens).tree
    assert (tree.budget, tree.num_steps, tree.num_reconsider, tree.offer_width) == (24, 5, 2, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 2}, "PR needs --tp-size to be 1, got 2: the drafter wants the whole embedding"),
        ({"device": "cpu"}, "--device to be 'cuda'"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode to be 'null'"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache to be False"),
        ({"speculative_draft_model_path": None}, "needs --speculative-draft-model-path"),
        ({"speculative_eagle_topk": 6}, "leave --speculative-eagle-topk out"),
        ({"page_size": 64, "attention_backend": "trtllm_mha"}, "--attention-backend must be flashinfer, fa3, triton"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_arguments(arguments(**changes))


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
