"""States from a server that extracts them: one of our own that speaks as vLLM does, and vLLM itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("httpx2")

from ports import free_port
from secondguess.cache import cache_dir
from secondguess.capture.run import fill, plan_capture
from secondguess.capture.served import Served
from secondguess.capture.source import Live
from secondguess.errors import UserError
from secondguess.target.base import default_tap_layers
from secondguess.target.hf import HFTarget
from secondguess.target.load import load_target
from secondguess.testing import tiny_target
from tiny_folder import byte_tokenizer

SEQUENCES = [(1, 2, 3, 4, 5), (9, 8, 7), (6,) * 12]


EAGLE3 = (2, 4, 5, 8)  # of 8 layers, and the last states


def raw_states(target: HFTarget, ids: list[int], layers: Sequence[int]) -> torch.Tensor:
    """[T, K, H]: inputs of layers, and (as layer 8) what the final norm reads, by transformers' own forward."""
    model, read = target.model, []
    hook = model.base_model.norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    inputs = [*(state[0] for state in states[:-1]), read[0][0]]
    return torch.stack([inputs[layer] for layer in layers], 1).contiguous()


@contextmanager
def server(
    target: HFTarget,
    folder: Path,
    extracts: bool = True,
    layers: Sequence[int] = EAGLE3,
    on_prompt: Callable[[list[int]], object] = lambda ids: None,
    names: Path | None = None,
) -> Iterator[str]:
    """``names``: the file that it names, whatever it wrote."""
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ids = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
            on_prompt(ids)
            path = folder / f"{threading.get_ident()}-{time.monotonic_ns()}.safetensors"
            with one_at_a_time:
                states = raw_states(target, ids, layers)
            save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
            path.with_name(path.name + ".lock").touch()
            said = {"kv_transfer_params": {"hidden_states_path": str(names or path)} if extracts else None}
            body = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()


def test_served_states_are_those_of_the_target(tmp_path: Path) -> None:
    target, twin = tiny_target("llama", 3), tiny_target("llama", 3)  # float64: the twin's own forward is still there
    (tmp_path / "files").mkdir()
    with server(twin, tmp_path / "files") as url:
        source = Served(url, "tiny", None, tmp_path, target, SEQUENCES)
        for ours, theirs in zip(source.read([2, 0]), Live(target, SEQUENCES).read([2, 0]), strict=True):
            torch.testing.assert_close(ours.hidden_TKH, theirs.hidden_TKH)
            assert torch.equal(ours.best_T, theirs.best_T)
        store = plan_capture(target, SEQUENCES, tmp_path / "captures")
        fill(store, source, "tiny", lambda n: None)
    assert not store.missing
    assert torch.equal(store[1].best_T, Live(target, SEQUENCES).read([1])[0].best_T)
    assert not list((tmp_path / "files").iterdir()), "what was taken is removed"


def test_servers_that_extract_nothing_or_something_else_are_named(tmp_path: Path) -> None:
    target = tiny_target("llama", 3)
    with server(target, tmp_path, extracts=False) as url, pytest.raises(UserError, match="extracts no hidden states"):
        Served(url, "tiny", None, tmp_path, target, SEQUENCES).read([0])
    few = pytest.raises(UserError, match=r"extracts states \(5, 3, 32\)")
    with server(target, tmp_path, layers=EAGLE3[:3]) as url, few:
        Served(url, "tiny", None, tmp_path, target, SEQUENCES).read([0])


@pytest.mark.parametrize("layers", [(1, 3, 4, 8), (3, 5, 6, 8), (2, 4, 5, 7), (2, 5, 4, 8)])
def test_a_server_that_extracts_other_layers_is_named(tmp_path: Path, layers: tuple[int, ...]) -> None:
    """Field faults 17 and 18: taps off by one, or labels from the layer before the last."""
    target, twin = tiny_target("llama", 3), tiny_target("llama", 3)
    said = re.escape(f"extracts the states {[*layers]} of 8 layers, not [2, 4, 5, 8]")
    with server(twin, tmp_path, layers=layers) as url, pytest.raises(UserError, match=said):
        Served(url, "tiny", None, tmp_path, target, SEQUENCES).check()


def test_a_server_that_extracts_the_layers_of_a_drafter(tmp_path: Path) -> None:
    target, twin, own = tiny_target("llama", 3), tiny_target("llama", 3), (1, 4, 7)
    with server(twin, tmp_path, layers=(*own, 8)) as url:
        source = Served(url, "tiny", None, tmp_path, target, SEQUENCES, own)
        source.check()
        [ours], [theirs] = source.read([2]), Live(target, SEQUENCES, own).read([2])
    torch.testing.assert_close(ours.hidden_TKH, theirs.hidden_TKH)


@pytest.mark.parametrize("named", ["mine", "states/../mine", "states/link"])
def test_files_elsewhere_are_not_touched(named: str, tmp_path: Path) -> None:
    """A server that is wrong, or hostile, names a file of the user's."""
    target, states = tiny_target("llama", 3), tmp_path / "states"
    states.mkdir()
    mine, lock = tmp_path / "mine", tmp_path / "mine.lock"
    save_file({"hidden_states": torch.ones(3, 4, 32), "token_ids": torch.tensor(SEQUENCES[1])}, mine)
    lock.touch()
    (states / "link").symlink_to(mine)
    outside = re.escape(f"names the file {mine.resolve()}, which is not in {states.resolve()}: give --shared-storage")
    with server(target, states, names=tmp_path / named) as url, pytest.raises(UserError, match=outside):
        Served(url, "tiny", None, states, target, SEQUENCES).read([1])
    assert mine.exists()
    assert lock.exists()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_text("a list"), "no file of states"),
        (lambda path: save_file({"weight": torch.ones(2)}, path), "holds weight and no states"),
        (lambda path: save_file({"hidden_states": torch.ones(2), "token_ids": torch.ones(2)}, path), "other tokens"),
    ],
)
def test_nothing_but_our_states_is_removed(write: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    target, mine, lock = tiny_target("llama", 3), tmp_path / "mine", tmp_path / "mine.lock"
    write(mine)
    lock.touch()
    with server(target, tmp_path, names=mine) as url, pytest.raises(UserError, match=said):
        Served(url, "tiny", None, tmp_path, target, SEQUENCES).read([1])
    assert mine.exists()
    assert lock.exists()


def test_a_shard_is_asked_for_at_once_and_nothing_of_it_stays(tmp_path: Path) -> None:
    """The server answers no prompt before it has all; then one of them is not what it was sent."""
    target, twin = tiny_target("llama", 3), tiny_target("llama", 3)  # the server catches what passes its own norm
    everybody = threading.Barrier(len(SEQUENCES), timeout=30)
    (tmp_path / "files").mkdir()
    with server(twin, tmp_path / "files", on_prompt=lambda ids: everybody.wait()) as url:
        source = Served(url, "tiny", None, tmp_path, target, SEQUENCES)
        store = plan_capture(target, SEQUENCES, tmp_path / "captures")
        fill(store, source, "tiny", lambda n: None)
    assert not store.missing

    def first_lies(ids: list[int]) -> None:
        """The others are on their way when it is found out."""
        everybody.wait()
        if ids == list(SEQUENCES[0]):
            ids[0] += 1
        else:
            time.sleep(0.5)

    with server(twin, tmp_path / "files", on_prompt=first_lies) as url:
        source = Served(url, "tiny", None, tmp_path, target, SEQUENCES)
        with pytest.raises(UserError, match="read other tokens than it was sent"):
            source.read(range(len(SEQUENCES)))
        [stays, lock] = sorted((tmp_path / "files").iterdir())
        assert load_file(stays)["token_ids"].tolist() == [2, 2, 3, 4, 5], "it is not what was asked for"
        assert lock.name == f"{stays.name}.lock"


@pytest.mark.timeout(60)
def test_nothing_stays_after_ctrl_c(tmp_path: Path) -> None:
    target, twin, asked = tiny_target("llama", 3), tiny_target("llama", 3), threading.Event()

    def slowly(ids: list[int]) -> None:
        asked.set()
        time.sleep(1)

    def interrupt() -> None:
        asked.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    (tmp_path / "files").mkdir()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest's may have none
    try:
        with server(twin, tmp_path / "files", on_prompt=slowly) as url:
            threading.Thread(target=interrupt, daemon=True).start()
            with pytest.raises(KeyboardInterrupt):
                Served(url, "tiny", None, tmp_path, target, SEQUENCES).read([0, 1, 2])
            assert not list((tmp_path / "files").iterdir())
    finally:
        signal.signal(signal.SIGINT, before)


VLLM = cache_dir() / "peers" / "vllm" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM.exists(), reason="no vllm: scripts/peers.sh vllm")
def test_vllm_extracts_the_targets_states(tmp_path: Path) -> None:
    # Heads of 64, as its CPU kernels want. In float64 a target's layers are still there to be saved.
    tiny_target("llama", 3, vocab_size=257, hidden_size=256).model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"))
    sequences = [tuple(range(1, 40)), (5, 6, 7, 8)]
    with vllm(tmp_path, target.spec.num_layers) as url:
        source = Served(url, str(tmp_path / "target"), None, tmp_path / "states", target, sequences)
        source.check()
        states = source.read([0, 1])
    for ours, theirs in zip(states, Live(target, sequences).read([0, 1]), strict=True):
        torch.testing.assert_close(ours.hidden_TKH.float(), theirs.hidden_TKH.float(), rtol=0.02, atol=0.02)
        assert (ours.best_T == theirs.best_T).float().mean() > 0.9


@contextmanager
def vllm(folder: Path, num_layers: int) -> Iterator[str]:
    port, layers = free_port(), [*default_tap_layers(num_layers), num_layers]
    extract = {"eagle_aux_hidden_state_layer_ids": layers}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": extract},
    }
    transfer = {
        "kv_connector": "CpuHiddenStates",
        "kv_connector_module_path": "cpu_hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "states")},
    }
    flags = ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager", "--no-enable-chunked-prefill"]
    configs = ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)]
    server = [str(VLLM), "-m", "vllm.entrypoints.openai.api_server"]  # the command "vllm" wants a package of that name
    command = [*server, "--model", str(folder / "target"), "--port", str(port), *flags, *configs]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(Path(__file__).parent)}
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log)
    try:
        await_vllm(process, port, folder / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def await_vllm(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    probe = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    while subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
        assert process.poll() is None, log.read_text()[-4000:]
        time.sleep(2)
