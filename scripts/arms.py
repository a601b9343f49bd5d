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


def secondguess(*args: str, quiet: bool = False) -> None:
    """Run a command; where it fails, end as it did."""
    out = subprocess.DEVNULL if quiet else None
    if code := subprocess.run([sys.executable, "-m", "secondguess", *args], stdout=out).returncode:
        sys.exit(code)


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
    for name, arm in spec["arms"].items():  # all of them, before hours go into the first
        secondguess("train", *settings(out, name, spec["train"], arm), "--print-config", quiet=True)
    for name, arm in spec["arms"].items():
        secondguess("train", *settings(out, name, spec["train"], arm))
    compared = [m for name, arm in spec["arms"].items() for m in methods(out, name, arm)]
    target = spec["train"]["target"]
    secondguess("eval", target, "--method", ",".join(compared), "--json", str(out / "eval.json"), *args.flags)


if __name__ == "__main__":
    main(sys.argv[1:])
