"""Pages of the documentation that are made from what is elsewhere: README and its like, the parsers, the configs.

MkDocs calls ``on_files`` (``hooks`` in mkdocs.yml); the other functions make the pages and need nothing of it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from secondguess.cli import COMMANDS, parser_of
from secondguess.config import Reconsider, TreeConfig
from secondguess.fields import alternatives
from secondguess.methods import SHORT, USES
from secondguess.server.settings import Settings
from secondguess.train.config import TrainConfig
from secondguess.types import SamplingParams

ROOT = Path(__file__).parent.parent
WHOLE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
CONFIGS = {
    "Draft tree": (TreeConfig, "Flags of most commands, and settings of a method (`pr:budget=8,num_steps=4`)."),
    "Second looks": (Reconsider, "Settings of `pr` and `hass+pr` (`pr:merge=drop`); what they mean is said below."),
    "Sampling": (SamplingParams, "Flags of `generate`, fields of the API, and of `secondguess.SamplingParams`."),
    "Training": (TrainConfig, "Keys of the YAML file of `train`, and `key=value` on its command line."),
    "Server": (Settings, "Flags of `serve`, beside those of the draft tree."),
}
VARIABLES = {
    "SECONDGUESS_CACHE": "folder of everything that can be made again (`~/.cache/secondguess`)",
    "SECONDGUESS_DATA": "folder of the named tasks' files",
    "SECONDGUESS_API_KEY": "key that the server's clients must send",
    "SECONDGUESS_DEBUG": "1: a command that fails shows its traceback",
    "SECONDGUESS_METHOD": "method that the SGLang plug-in drafts by (`pr`)",
    "CC": "C compiler for the compiled layers",
    "OPENAI_API_KEY": "key for the server that `prepare --endpoint` asks",
}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pages = {page: whole(source) for page, source in WHOLE.items()}
    pages |= {"reference/commands.md": commands_page(), "reference/configuration.md": configuration_page()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def whole(source: str) -> str:
    """A file of the top folder, its links as the site has them."""
    text = (ROOT / source).read_text(encoding="utf-8")
    text = re.sub(r"\[([^\]]+)\]\(LICENSE\)", r"\1", text).replace("](docs/", "](")
    for page, name in WHOLE.items():
        text = text.replace(f"]({name})", f"]({page})")
    return text


def commands_page() -> str:
    """Every command and flag."""
    parts = ["# Commands", "As `secondguess COMMAND --help` prints it."]
    for name, about in COMMANDS.items():
        parser, _ = parser_of(name)
        rows = [(invocation(action), value_of(action), action.help or "") for action in parser._actions]
        parts += [f"## {name}", f"{about[0].upper()}{about[1:]}.", table(("", "value", "meaning"), rows)]
        if parser.epilog:
            parts.append(f"```text\n{parser.epilog}\n```")
    return "\n\n".join(parts) + "\n"


def invocation(action: argparse.Action) -> str:
    if action.option_strings:
        return "<br>".join(f"`{flag}`" for flag in action.option_strings)
    name = str(action.metavar or action.dest)
    return f"`{name}...`" if action.nargs in ("*", "+") else f"`{name}`"


def value_of(action: argparse.Action) -> str:
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if not action.option_strings or action.nargs == 0:
        return ""
    return f"`{action.metavar or action.dest.upper()}`"


def configuration_page() -> str:
    """Every field of the configs, which methods use which, and the environment variables."""
    parts = ["# Configuration", "A field that is not known, or of no use to what was chosen, is an error."]
    for title, (cls, about) in CONFIGS.items():
        hints = get_type_hints(cls)
        rows = [row(field, hints[field.name]) for field in fields(cls) if "help" in field.metadata]
        parts += [f"## {title}", about, table(("name", "value", "default", "meaning"), rows)]
        if cls is Reconsider:
            parts.append(words_of(cls))
    uses = [(f"`{method}`", ", ".join(f"`{name}`" for name in names) or "none") for method, names in USES.items()]
    short = ", ".join(f"`{a}` is `{b}`" for a, b in SHORT.items())
    parts += ["## Methods", f"Settings that each takes. For short, {short}.", table(("method", "settings"), uses)]
    variables = [(f"`{name}`", text) for name, text in VARIABLES.items()]
    parts += ["## Environment variables", table(("name", "meaning"), variables)]
    return "\n\n".join(parts) + "\n"


def row(field: Field[Any], hint: Any) -> tuple[str, str, str, str]:
    factory = field.default_factory
    default = field.default if factory is MISSING else factory()
    shown = "required" if default is MISSING else f"`{default}`"
    return f"`{field.name}`", kind_of(hint), shown, field.metadata["help"]


def kind_of(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    kind, instead = alternatives(hint)
    return " or ".join([kind.__name__, *("none" if value is None else value for value in instead)])


def words_of(cls: type) -> str:
    """A class's docstring, without the paragraphs that open and close it."""
    return "\n\n".join(cleandoc(cls.__doc__ or "").split("\n\n")[1:-1]).replace("``", "`")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """argparse writes a percent sign twice; a bar would end the cell."""
    return text.replace("%%", "%").replace("|", "\\|").replace("\n", " ")
