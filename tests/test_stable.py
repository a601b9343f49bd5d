"""Bit equality of attention rows. A failure here means that this machine's matrix product adds in another order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from secondguess.target.linear import PackedLinear, can_pack
from secondguess.target.stable import BLOCK, StableAttention, position_spans

DRAFT = 64  # columns of a draft, the most that ``TreeConfig.budget`` promises equal bits for
DEPTH = 12


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
    """[R, H, N, D]"""
    plan = StableAttention(visible, positions, q, k.shape[1])
    return plan(q, k, v, q.shape[-1] ** -0.5).transpose(1, 2)


@pytest.mark.parametrize(("h", "g", "d"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (4, 2, 8)])
@pytest.mark.parametrize("base", [1, 2, 9, 15, 40, BLOCK - 5, BLOCK - 1, BLOCK, 2 * BLOCK - 3, 390])
def test_a_draft_row_equals_plain_decoding(base: int, h: int, g: int, d: int) -> None:
    """A path scattered over the columns of a draft, against one token at a time in consecutive columns."""
    random = torch.Generator().manual_seed(base)
    path = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(DRAFT - 1, generator=random)[: DEPTH - 1]])
    path = path.sort().values
    k, v = (torch.randn(1, g, base + DRAFT, d, generator=random) for _ in range(2))
    k_plain, v_plain = (torch.cat([x[:, :, :base], x[:, :, base + path]], 2) for x in (k, v))
    positions = torch.arange(base + DRAFT)
    positions[base:] = base + torch.randint(1, DEPTH, (DRAFT,), generator=random)
    positions[base + path] = base + torch.arange(DEPTH)
    visible = torch.cat([torch.ones(DRAFT, base), torch.eye(DRAFT)], 1).bool()
    visible[path[:, None], base + path] = torch.ones(DEPTH, DEPTH, dtype=torch.bool).tril()
    q = torch.randn(1, h, DRAFT, d, generator=random)

    out = attend(q, k, v, visible[None], positions[None])
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True), atol=3e-6, rtol=0
    )
    for depth, node in enumerate(path.tolist()):
        w = base + depth + 1
        seen, at = torch.ones(1, 1, w, dtype=torch.bool), torch.arange(w)[None]
        alone = attend(q[:, :, [node]], k_plain[:, :, :w], v_plain[:, :, :w], seen, at)
        assert torch.equal(alone, out[:, :, [node]])


def test_rows_do_not_depend_on_batch_mates_or_chunks() -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(3, 9, 300, 64, generator=random)
    k, v = (torch.randn(3, 3, 300, 64, generator=random) for _ in range(2))
    visible = torch.ones(3, 300, 300, dtype=torch.bool).tril()
    positions = torch.arange(300).expand(3, 300)
    out = attend(q, k, v, visible, positions)
    for r, n in ((0, 1), (1, 40), (2, 257)):
        one = slice(r, r + 1)
        alone = attend(q[one, :, :n], k[one, :, :n], v[one, :, :n], visible[one, :n, :n], positions[one, :n])
        assert torch.equal(alone, out[one, :, :n])


def test_spans_split_by_position() -> None:
    positions = torch.tensor([[*range(BLOCK), BLOCK - 1, BLOCK, BLOCK - 1, BLOCK, 5]])
    visible = torch.ones(1, 1, BLOCK + 5, dtype=torch.bool)
    visible[..., -1] = False  # nobody sees the last column, so what it holds does not count
    low, high = position_spans(visible, positions)
    assert (low.start, low.stop) == (0, BLOCK + 3)
    assert (high.start, high.stop) == (BLOCK + 1, BLOCK + 4)
    assert low.mine_R1W is not None
    assert low.mine_R1W[0, 0].nonzero().squeeze(1).tolist() == [*range(BLOCK + 1), BLOCK + 2]
    assert high.mine_R1W is not None
    assert high.mine_R1W.tolist() == [[[True, False, True]]]


@pytest.mark.parametrize(("size_in", "size_out"), [(576, 192), (576, 1536), (1536, 576)])
def test_packed_linear(size_in: int, size_out: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(size_in, size_out)
    if not can_pack(linear):
        pytest.skip("this PyTorch cannot pack linear layers")
    packed, x = PackedLinear(linear), torch.randn(400, size_in)
    with torch.no_grad():
        full = packed(x)
        torch.testing.assert_close(full, linear(x), atol=1e-5, rtol=1e-5)
        for n in (*range(2, 100), *range(100, 400, 7)):
            assert torch.equal(packed(x[:n]), full[:n])
