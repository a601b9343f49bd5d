"""The compiled linear layers: the weights they say, rows that depend on no others, a fallback without a compiler."""

from __future__ import annotations

import ctypes
import logging
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secondguess.kernels import build
from secondguess.kernels.linear import FORMS, GROUP, CompactLinear, CompactNorm, holds, rounded, to_int4, to_int8
from secondguess.kernels.structs import STRUCTS

FORM_NAMES = list(FORMS)


def layer(num_inputs: int, num_outputs: int, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(num_inputs, num_outputs, bias=bias)


@given(
    form=st.sampled_from(FORM_NAMES),
    rows=st.integers(0, 23),
    groups=st.integers(1, 7),
    num_outputs=st.integers(1, 150),
    bias=st.booleans(),
)
def test_it_multiplies_with_the_rounded_weights(
    form: str, rows: int, groups: int, num_outputs: int, bias: bool
) -> None:
    linear = layer(groups * GROUP, num_outputs, bias)
    x = torch.randn(rows, groups * GROUP)
    expected = x.double() @ rounded(linear.weight.detach(), form).double().T
    if bias:
        expected = expected + linear.bias.detach().double()
    torch.testing.assert_close(CompactLinear(linear, form)(x).double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", FORM_NAMES)
def test_a_row_has_the_same_bits_in_any_batch(form: str) -> None:
    compact = CompactLinear(layer(224, 200), form)
    x = torch.randn(300, 224)
    whole = compact(x)
    for start, count in ((0, 1), (7, 1), (299, 1), (3, 2), (10, 3), (0, 9), (100, 49), (1, 257)):
        assert torch.equal(compact(x[start : start + count]), whole[start : start + count])


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_fewer_bits_give_the_bits_of_the_float32_weights_that_they_stand_for(form: str) -> None:
    linear, same = layer(160, 200), layer(160, 200)
    same.weight = nn.Parameter(rounded(linear.weight.detach(), form))
    x = torch.randn(13, 160)
    assert torch.equal(CompactLinear(linear, form)(x), CompactLinear(same, "float32")(x))


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    compact, x, before = CompactLinear(layer(96, 300), "bfloat16"), torch.randn(13, 96), torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(compact(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_any_number_of_inputs(form: str) -> None:
    linear, x = layer(77, 33), torch.randn(5, 77)
    expected = x @ rounded(linear.weight.detach(), form).T
    torch.testing.assert_close(CompactLinear(linear, form)(x), expected, rtol=0, atol=1e-5)


def test_other_shapes_and_strides() -> None:
    compact, x = CompactLinear(layer(64, 48), "float32"), torch.randn(3, 64, 5).transpose(1, 2)
    assert torch.equal(compact(x), compact(x.reshape(-1, 64)).view(3, 5, 48))


def test_weights_of_llama_cpp_are_met_exactly() -> None:
    """Q8_0 is scale * number, Q4_1 scale * number + offset, the scales float16; the ends of the range are in use."""
    generator = torch.Generator().manual_seed(0)
    scales = (torch.rand(6, 4, 1, generator=generator) / 100).half().float()
    numbers8 = torch.randint(-127, 128, (6, 4, GROUP), generator=generator)
    numbers8[..., 0] = -127
    eight = (scales * numbers8).flatten(1)
    assert torch.equal(to_int8(eight).expanded(), eight)
    numbers4 = torch.randint(0, 16, (6, 4, GROUP), generator=generator)
    numbers4[..., :2] = torch.tensor([0, 15])
    offsets = -torch.rand(6, 4, 1, generator=generator).half().float()
    four = (scales * numbers4 + offsets).flatten(1)
    assert torch.equal(to_int4(four).expanded(), four)
    linear = nn.Linear(4 * GROUP, 6, bias=False)
    linear.weight.data.copy_(four)
    assert holds(linear, "int4")
    assert not holds(linear, "int8")
    assert not holds(linear, "bfloat16")


def test_a_group_of_equal_weights() -> None:
    for value in (0.0, 0.25):
        same = torch.full((2, GROUP), value)
        assert torch.equal(to_int4(same).expanded(), same)
        torch.testing.assert_close(to_int8(same).expanded(), same)


@pytest.mark.parametrize(("form", "step"), [("int8", 2 / 254), ("int4", 1 / 15)])
def test_rounding_is_at_most_half_a_step(form: str, step: float) -> None:
    weight = torch.rand(20, 5 * GROUP) * 2 - 1
    spread = 1.0 if form == "int8" else 2.0
    assert (rounded(weight, form) - weight).abs().max() <= spread * step / 2 + 2e-3


@pytest.mark.parametrize("form", FORM_NAMES)
def test_packed_weights_count_as_memory_and_are_not_saved(form: str) -> None:
    compact = CompactLinear(layer(64, 48), form)
    assert [buffer.nbytes for buffer in compact.buffers()] == [compact.packed.nbytes]
    assert not compact.state_dict()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_of_another_type_are_not_read_as_float32(dtype: torch.dtype) -> None:
    for module in (CompactLinear(layer(64, 48), "float32"), CompactNorm(torch.ones(64), 1e-5)):
        with pytest.raises(AssertionError, match=f"{dtype} is read as torch.float32"):
            module(torch.ones(2, 64, dtype=dtype))


def test_the_compiled_code_allocates_nothing() -> None:
    """A cycle's memory is handed in. Names of functions that a library takes from others stand between zeros."""
    names = set(build._built().read_bytes().split(b"\0"))
    assert b"memcpy" in names
    assert not names & {b"malloc", b"calloc", b"realloc", b"aligned_alloc", b"posix_memalign", b"free"}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_have_the_same_fields_in_c(name: str) -> None:
    source = "".join(re.sub("//.*", "", path.read_text()) for path in build.SOURCES)
    body = re.findall(rf"struct {name} {{(.*?)}};", source, re.DOTALL)
    assert re.findall(r"(\w+)\s*[,;]", body[0]) == [field[0] for field in STRUCTS[name]._fields_]


def test_what_c_and_python_disagree_about_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build._built()
    assert isinstance(build._declare(path), ctypes.CDLL)
    monkeypatch.setitem(build.MIRRORED, "size_of_pass", 1)
    with pytest.raises(AssertionError, match="C and Python disagree"):
        build._declare(path)


def test_another_version_of_the_compiler_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for version in ("cc 12.2", "cc 12.2", "cc 12.3"):
        monkeypatch.setattr(build, "_run", lambda *_, said=version: CompletedProcess((), 0, said, ""))
        keys.append(build._key("cc"))
    assert keys[0] == keys[1] != keys[2]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fails(expected: str) -> None:
        """The reason is known from the first time on, when it is told."""
        build.attempt.cache_clear()
        caplog.clear()
        for _ in range(2):
            with pytest.raises(build.BuildError, match=expected):
                build.library()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "everything takes several times as long" in caplog.text

    advice = "install GCC 11 or later, or name a compiler in the variable CC"
    try:
        monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path))
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
        monkeypatch.delenv("CC", raising=False)
        fails(f"no C compiler: {advice}")
        monkeypatch.setenv("CC", "no-such-compiler")
        fails(rf"no-such-compiler does not start \(.*\): {advice}")
        monkeypatch.setenv("CC", "false")
        fails(rf"false cannot compile our C code \(no message\): {advice}")
        assert not list((tmp_path / "kernels").iterdir())
        (tmp_path / "file").touch()
        monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "file"))
        fails("nothing can be kept in")
    finally:
        build.attempt.cache_clear()
