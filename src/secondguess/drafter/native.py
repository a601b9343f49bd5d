"""The drafter in compiled code, over a slot cache: its block, and rounds that grow a tree.

R requests, X rows, H hidden size, D head dimension, V draft vocabulary. ``tests/test_native_drafter.py`` compares both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from secondguess.config import TreeConfig
from secondguess.drafter.model import DecoderLayer, Drafter, Midlayer, RMSNorm
from secondguess.drafter.passes import Pairs, Passes, Round
from secondguess.engine.slots import SlotCache
from secondguess.kernels.build import BuildError
from secondguess.kernels.decoder import CompiledLayer, run_layers, whole_vectors
from secondguess.kernels.draft import CompiledDrafter, CompiledRound
from secondguess.kernels.linear import CompactLinear, CompactNorm
from secondguess.kernels.workspace import Workspace
from secondguess.target.lean import joined
from secondguess.tree.rows import DraftRows, Offers
from secondguess.types import Rows


class NativeBlock:
    """``Drafter.block`` of packed weights."""

    def __init__(self, drafter: Drafter, form: str) -> None:
        """Takes layers, head, lens and norms over; the layers are dropped there. ``form``: of the weights.

        Raises BuildError where it cannot compile.
        """
        c = drafter.config
        self.drafter, self.turns, self.workspace = drafter, (torch.empty(0), torch.empty(0)), Workspace()
        self.layers = [compiled(layer, drafter, form) for layer in drafter.blocks]
        drafter.set_submodule("midlayer", nn.Identity())
        drafter.layers.clear()
        drafter.blocks = ()
        head, lens = CompactLinear(drafter.lm_head, form), CompactLinear(drafter.lens, form) if c.lens else None
        drafter.set_submodule("lm_head", head)
        if lens:
            drafter.set_submodule("lens", lens)
        for name, module in list(drafter.named_modules()):
            if isinstance(module, RMSNorm):
                drafter.set_submodule(name, CompactNorm(module.weight, c.rms_norm_eps))
        self.whole = CompiledDrafter.of(
            self.layers,
            embedding=drafter.embedding,
            norm=drafter.norm.weight,
            eps=c.rms_norm_eps,
            norm_output=c.norm_output,
            head=head,
            lens=lens,
            target_ids=drafter.target_ids,
        )

    def __call__(self, cache: SlotCache, rows: Rows, e_RXH: Tensor, g_RXH: Tensor) -> Tensor:
        """Features [R, X, H] of rows with embedding ``e_RXH`` and feature ``g_RXH``."""
        y_RXH = g_RXH.clone(memory_format=torch.contiguous_format)
        turn = rotation(self.drafter, rows.positions_RN)
        run_layers(self.layers, y_RXH, turn, rows, cache, self.workspace, e_RXH)
        return self.drafter.feature(y_RXH)

    def rotations(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Of the first positions, as ``rotation``; so many or more."""
        if len(self.turns[0]) < num_positions:
            self.turns = rotation(self.drafter, torch.arange(2 * num_positions))
        return self.turns


class NativeRound(Round):
    """A round whose forwards are calls of compiled code."""

    def __init__(self, passes: Passes[SlotCache], pairs: Pairs, f_root_RH: Tensor, noise_RDV: Tensor | None) -> None:
        super().__init__(passes, pairs, f_root_RH, noise_RDV)
        native, config, look = passes.drafter.native, passes.config, passes.config.reconsider
        assert isinstance(native, NativeBlock)
        asks = config.num_reconsider > 0 and look.query_slot == "self_query"
        self.width = config.offer_width
        self.compiled = CompiledRound(
            native.whole,
            passes.cache,
            f_root_RH,
            self.slots_R.contiguous(),
            self.root_column_R1[:, 0].contiguous(),
            length=self.max_length,
            room=1 + config.num_steps * config.rows_per_step,
            rotation=native.rotations(self.max_length + config.num_steps + 1),
            noise_RDV=noise_RDV,
            query=passes.drafter.self_query.detach() if asks else None,
            query_ahead=look.query_rope == "next",
            workspace=native.workspace,
        )
        self.features_RYH = self.compiled.features_RYH

    def root_offers(self) -> Offers:
        return self.compiled.root_offers(self.width)

    def forward(self, rows: DraftRows) -> Offers:
        return self.compiled.forward(rows, self.width)

    @staticmethod
    def takes(drafter: Drafter, config: TreeConfig) -> bool:
        """Whether there is compiled code for all that such trees ask of the drafter."""
        look = config.reconsider
        usual = look.select not in ("entropy", "margin") and look.query_slot != "soft_pred" and not look.asks_for_known
        return isinstance(drafter.native, NativeBlock) and usual


def rotation(drafter: Drafter, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of positions [...], the sine's first half negated: float32 [..., D]."""
    cos_1d, sin_1d = (turn.float().squeeze(-2) for turn in drafter.rotation(positions))
    return torch.cat((cos_1d, cos_1d), -1), torch.cat((-sin_1d, sin_1d), -1)


def compiled(layer: DecoderLayer, drafter: Drafter, form: str) -> CompiledLayer:
    attention, mlp, c = layer.self_attn, layer.mlp, drafter.config
    return CompiledLayer.of(
        (
            joined(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.o_proj,
            joined(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj,
        ),
        (
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None,
            None,
            layer.hidden_norm.weight if isinstance(layer, Midlayer) else None,
        ),
        form=form,
        eps=c.rms_norm_eps,
        num_heads=(c.num_attention_heads, c.num_key_value_heads),
        head_dim=c.head_dim,
    )


def native_block(drafter: Drafter, form: str) -> NativeBlock | None:
    """None where the code cannot be compiled, or does not take the drafter: sizes that fill no vectors, other norms."""
    c = drafter.config
    try:
        takes = whole_vectors(c.head_dim, c.intermediate_size) and not c.norm_before_residual
        return NativeBlock(drafter, form) if takes else None
    except BuildError:
        return None
