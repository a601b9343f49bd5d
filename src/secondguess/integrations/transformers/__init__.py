"""``model.generate`` of transformers with this package's engine: the same tokens in less time.

    from secondguess.integrations.transformers import FOLDER, decode

    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True, drafter="path/to/drafter")
    model.generate(**inputs, custom_generate=decode, drafter="path/to/drafter")

``method`` may be given as to ``LLM``. Both ways do the same, but of ``streamer`` and ``assistant_model`` transformers
tells a function nothing: both are dropped there, where a folder streams to the first and refuses the second. The model
stays as it is; on the CPU in float32 the engine keeps a second copy of its weights, laid out for speed.
"""

from __future__ import annotations

from pathlib import Path

from secondguess.integrations.transformers.decode import decode, generate

FOLDER = str(Path(__file__).parent)

__all__ = ["FOLDER", "decode", "generate"]
