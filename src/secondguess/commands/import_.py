"""``secondguess import``: an EAGLE-3 drafter of another trainer, for a target that is at hand."""

from __future__ import annotations

import argparse
from pathlib import Path

from secondguess.commands.options import add_trust

SETTINGS = """settings (--set KEY=VALUE, where the drafter's config is wrong or silent):
  fc_norm, norm_before_fc, norm_before_residual, norm_output   true or false
  own_embedding    false: use the target's token embedding instead of the one that was saved
  rope_theta       the base that it was really trained with
  layer_ids        inputs (vLLM) or outputs (SGLang, SpecForge): what numbers of tapped layers mean;
                   or the layers whose inputs it reads: 2,16,29"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = SETTINGS
    add = parser.add_argument
    add("source", metavar="FOLDER", help="folder or hub id of a drafter: EAGLE-3's flat form, or speculators'")
    add("folder", type=Path, metavar="DIR", help="new folder")
    add("--target", required=True, help="folder, hub id, .gguf file, or smollm2-135m")
    add_trust(parser)
    add("--set", dest="given", action="append", default=[], metavar="KEY=VALUE", help="see below; may be repeated")
    add("--dtype", default="float32", help="of the target: float32, float64 or bfloat16 (default: float32)")


def run(args: argparse.Namespace) -> int:
    from secondguess.commands.compare import load, stdout_console
    from secondguess.commands.show_findings import conclusion, table
    from secondguess.drafter.checkpoint import open_checkpoint, save_drafter
    from secondguess.drafter.checks import examine
    from secondguess.drafter.folder import check_new, new_folder
    from secondguess.drafter.foreign import find_source, parse_given, read_foreign
    from secondguess.drafter.foreign_tensors import Source
    from secondguess.engine.thread import run as on_engine

    given = parse_given(args.given)
    check_new(args.folder)
    folder, target = find_source(args.source), load(args.target, args.dtype, "cpu", args.trust_remote_code)
    source = Source(folder, target, given)
    imported = on_engine(read_foreign, source)
    notes = {"target": args.target, "imported": {"from": folder.name, "given": given}}
    with new_folder(args.folder) as temporary:
        save_drafter(imported.drafter, temporary, notes, imported.dtype)
    checkpoint = on_engine(open_checkpoint, args.folder, target)
    findings = on_engine(examine, checkpoint, target.facts, target.embedding)
    console = stdout_console()
    for remark in source.remarks:
        console.print(remark, markup=False, soft_wrap=True)
    console.print(table(findings), conclusion(findings), "", sep="\n")
    probe = f"secondguess doctor {args.target} {args.folder}"
    console.print(f"written to {args.folder}; '{probe}' counts how many of its guesses are right", markup=False)
    return 0
