"""Plain decoding's texts, recorded once: speculation cannot change them, so drafters are replayed over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from secondguess.atomic import check_folder
from secondguess.bench.plan import Prompt, prompt_seed
from secondguess.bench.signed import sha256, signed, unsigned
from secondguess.llm import LLM
from secondguess.types import FinishReason, SamplingParams

FORMAT = 2  # raise it when the rule that chooses tokens changes
BEYOND = 16  # tokens recorded past the end, where the drafts of the last cycle reach


class Key(NamedTuple):
    """Which text of a folder."""

    task: str
    id: str
    prompt: str  # SHA-256 of its token ids and stop strings


@dataclass(frozen=True, slots=True)
class Transcript:
    """What plain decoding wrote, and what it would have written next."""

    key: Key
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    beyond_ids: tuple[int, ...]
    finish_reason: FinishReason


def key_of(prompt: Prompt) -> Key:
    return Key(prompt.task, prompt.id, sha256([prompt.ids, prompt.stop]))


class TranscriptStore:
    """The texts of one target, temperature, seed, limit and numeric mode, a checksummed line each.

    ``made_of`` is all that they depend on besides the prompt: a change of it is another folder. A line that is damaged,
    or of another prompt, counts as missing.
    """

    def __init__(self, parent: Path, made_of: Mapping[str, Any]) -> None:
        self.folder = parent / sha256(dict(made_of) | {"format": FORMAT})[:16]
        check_folder(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "made_of.json").write_text(json.dumps(dict(made_of), indent=2) + "\n", encoding="utf-8")
        self._lines = self.folder / "texts.jsonl"
        self.texts = self._read() if self._lines.exists() else {}

    def add(self, transcripts: Iterable[Transcript]) -> None:
        """Keep texts, on disk before anything else happens."""
        made = list(transcripts)
        lines = [signed(asdict(t)) for t in made]
        with self._lines.open("a", encoding="utf-8") as file:
            # A line that a kill cut short would swallow the next one.
            file.write("".join(lines) if _ends_whole(self._lines) else "\n" + "".join(lines))
        self.texts |= {t.key: t for t in made}

    def _read(self) -> dict[Key, Transcript]:
        found = (_parse(line) for line in self._lines.read_bytes().splitlines())
        return {t.key: t for t in found if t is not None}


def record(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, store: TranscriptStore, on_done: Callable[[int], None]
) -> list[Transcript]:
    """The transcripts of ``prompts``, in order; what ``store`` lacks is decoded by ``llm``, batched.

    ``llm`` decodes plainly and has room for BEYOND tokens more. ``params.seed`` is the run's, each prompt's own comes
    from it. ``on_done`` hears how many texts have become available.
    """
    missing = [p for p in prompts if key_of(p) not in store.texts]
    on_done(len(prompts) - len(missing))
    size = llm.engine.cache.num_slots
    for group in (missing[i : i + size] for i in range(0, len(missing), size)):
        store.add(_decode(llm, group, params))
        on_done(len(group))
    return [store.texts[key_of(p)] for p in prompts]


def _decode(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[Transcript]:
    each = [replace(params, seed=prompt_seed(params.seed or 0, p.id), stop=p.stop) for p in prompts]
    outputs = llm.generate([p.ids for p in prompts], each)
    # Noise depends on the position, not on where a request began: this is what would have come next.
    longer = [o.prompt_ids + o.token_ids for o in outputs]
    more = llm.generate(longer, [replace(p, max_tokens=BEYOND, ignore_eos=True, stop=()) for p in each])
    return [
        Transcript(key_of(p), o.prompt_ids, o.token_ids, b.token_ids, o.finish_reason)
        for p, o, b in zip(prompts, outputs, more, strict=True)
    ]


def _parse(data: bytes) -> Transcript | None:
    try:
        line = unsigned(data)
        line["key"] = Key(*line["key"])
        for name in ("prompt_ids", "answer_ids", "beyond_ids"):
            line[name] = tuple(line[name])
        return Transcript(**line)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _ends_whole(path: Path) -> bool:
    data = path.read_bytes() if path.exists() else b""
    return not data or data.endswith(b"\n")
