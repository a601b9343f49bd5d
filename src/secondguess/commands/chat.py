"""``secondguess chat``: a conversation on the terminal, the twin of the server's page."""

from __future__ import annotations

import argparse

from secondguess.commands.generate import add_sampling
from secondguess.commands.options import add_dataclass, add_drafter, add_dtype, add_target, from_args
from secondguess.commands.others import others
from secondguess.config import TreeConfig
from secondguess.methods import METHODS, SHAPE, parse_method, refuse_unused
from secondguess.types import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    methods = f"{', '.join(METHODS)}, with settings if wanted (pr:m=0); /method takes another"
    parser.add_argument("--method", default="pr", help=f"{methods} (default: pr)")
    add_drafter(parser)
    add_dtype(parser)
    add_dataclass(parser, TreeConfig, SHAPE)
    add_sampling(parser, 512)


def run(args: argparse.Namespace) -> int:
    tree, params = from_args(TreeConfig, args), from_args(SamplingParams, args, max_tokens=args.max_new_tokens)
    method = parse_method(args.method, tree)
    refuse_unused([method], tree)
    from secondguess.commands.chat_talk import Talk, converse
    from secondguess.commands.compare import load, stdout_console
    from secondguess.llm import LLM

    target = load(args.target, args.dtype, args.device, args.trust_remote_code)
    more = others(method, args.drafter, target)
    llm = LLM(target, args.drafter, method=args.method, others=more, tree=tree, max_batch_size=1)
    llm.generate([0], SamplingParams(max_tokens=8, ignore_eos=True))  # what torch does once is no part of an answer
    converse(Talk(llm, params, stdout_console()))
    return 0
