#!/usr/bin/env python3
"""Train several drafters on the same data, in the same order, for the same steps, and compare them by replay.

    scripts/arms.py ARMS.yaml OUT [FLAG of `secondguess eval`]...

ARMS.yaml (``configs/arms.yaml`` is one) has `train`, settings that all arms share, and `arms`, by name: what an arm
changes of them, and as `draft` the method that it is compared as, with settings (`pr:merge=union`), of which there
may be several. The first arm is the baseline. An arm lies in OUT/NAME; interrupted, or with arms added, the same
command goes on. The comparison is OUT/eval.json and a table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

FLAGS_OF = ("eval", "smollm2-135m")  # the command that further flags are for, and what it needs


def secondguess(*args: str, quiet: bool = False) -> str:
    """Run a command; where it fails, end as it did. What it printed, if it did so quietly."""
    out = subprocess.PIPE if quiet else None
    done = subprocess.run([sys.executable, "-m", "secondguess", *args], stdout=out, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


def read(path: Path) -> dict[str, Any]:
    """The file of arms. Ends with a line that says what is wrong with it."""
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        wrong(f"cannot read {path}: {str(error).splitlines()[0]}")
    if not (isinstance(spec, dict) and all(isinstance(spec.get(key), dict) and spec[key] for key in ("train", "arms"))):
        wrong(f"{path} must have train and arms, with something in them")
    for name, arm in spec["arms"].items():
        if not (isinstance(arm, dict) and "method" in arm):
            wrong(f"{path}: arm {name} needs a method")
        if "," in str(name):
            wrong(f"{path}: arm {name}: a comma would part the list of methods, choose another name")
    return spec


def wrong(said: str) -> NoReturn:
    print(f"arms: {said}", file=sys.stderr)
    sys.exit(2)


def text_of(value: Any) -> str:
    """As YAML reads it again: on and off, which YAML takes for true and false, are words here."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings(out: Path, name: str, shared: dict[str, Any], arm: dict[str, Any]) -> list[str]:
    """Of a training run, as overrides."""
    own = {key: value for key, value in arm.items() if key != "draft"}
    return [f"{key}={text_of(value)}" for key, value in {**shared, **own, "out": out / name}.items()]


def methods(out: Path, name: str, arm: dict[str, Any]) -> list[str]:
    """What an arm is compared as, each with its drafter."""
    drafts = arm.get("draft", arm["method"])
    typed = [drafts] if isinstance(drafts, str) else drafts
    return [f"{m}{',' if ':' in m else ':'}drafter={out / name / 'drafter'}" for m in typed]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """``flags`` are those of ``secondguess eval``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", type=Path, metavar="ARMS.yaml")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder")
    args, flags = parser.parse_known_args(argv)
    args.flags = flags
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    spec, out = read(args.arms), args.out
    if "," in str(out):
        wrong(f"{out}: a comma would part the list of methods, choose another folder")
    runs = {name: settings(out, name, spec["train"], arm) for name, arm in spec["arms"].items()}
    compared = [m for name, arm in spec["arms"].items() for m in methods(out, name, arm)]
    # All that can be wrong, before hours go into the first arm.
    said = [secondguess("train", *run, "--print-config", quiet=True) for run in runs.values()]
    targets = {yaml.safe_load(text)["target"] for text in said}
    if len(targets) > 1:
        wrong(f"the arms have several targets ({', '.join(sorted(targets))}): give one, under train")
    compare = ("eval", *targets, "--method", ",".join(compared), *args.flags)
    secondguess(*compare, "--dry-run")
    for run in runs.values():
        secondguess("train", *run)
    secondguess(*compare, "--json", str(out / "eval.json"))


if __name__ == "__main__":
    main(sys.argv[1:])
