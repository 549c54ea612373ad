"""Real processes, on one node and on two that share a folder, write what one process writes; one that dies ends all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import REPOSITORY, SHORT, SMALL_SHARDS, digest, prepared_for_capture, tokenize_in, write_parameters
from safetensors.torch import load_file
from stage_process import LIMIT, TESTS, run_stage, stage_command
from test_finetune import RECIPE
from test_finetune import prepared as prepared_for_finetune
from test_mixing_stage import bytes_of
from test_mixing_stage import prepare as prepare_for_measure

from attnmix.core.names import ACTIVATIONS
from stages.common.resume import UNFINISHED

pytestmark = pytest.mark.long

CONSTANTS: dict[str, dict[str, int]] = {"finetune": {}, "capture": SMALL_SHARDS, "measure": {}}
MEASURE = {
    "measure": {"documents": 6, "gradient_documents": 2, "gradient_max_length": 9},
    "capture": {"documents": [3], "texts": ["time flies like an arrow ."], "max_length": 20, "batch_tokens": 80},
}


def prepared(folder: Path, stage: str, tiny_bert: Path) -> Path:
    """Return a folder with the inputs of the stage."""
    folder.mkdir()
    if stage == "finetune":
        prepared_for_finetune(folder, tiny_bert)
        config = folder / "models/pretrained/config.json"
        plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # dropout differs between processes
        config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | plain), encoding="utf-8")
        write_parameters(folder, finetune=RECIPE | {"epochs": 3}, **SHORT)
    elif stage == "capture":
        prepared_for_capture(folder, tiny_bert)
        write_parameters(folder, capture={"documents": list(range(12)), "max_length": 40})
    else:
        prepare_for_measure(folder)
        write_parameters(folder, **MEASURE)
    return folder


def assert_same(stage: str, folder: Path, expected: Path) -> None:
    """Compare every byte of stores, ratios and tables; a fine-tuned model up to the order of sums."""
    if stage == "finetune":
        one, other = (load_file(each / "models/finetuned/model.safetensors") for each in (folder, expected))
        # The softmax does not see a key's bias: its gradient is rounding, which Adam makes as large as any other.
        compared = [key for key in one if not key.endswith("key.bias")]
        assert max(float((one[key] - other[key]).abs().max()) for key in compared) < 1e-4
        curves = [pd.read_csv(each / "reports/plots/finetune/finetune.csv") for each in (folder, expected)]
        pd.testing.assert_frame_equal(*curves, rtol=0, atol=1e-5)
    elif stage == "capture":
        assert digest(folder / ACTIVATIONS) == digest(expected / ACTIVATIONS)
    else:
        assert bytes_of(folder) == bytes_of(expected)
    assert not (folder / UNFINISHED).exists()


def run_two_nodes(folder: Path, stage: str) -> list[int]:
    """Return the status of two launchers that meet at a port of this machine, each with one process."""
    if stage != "finetune":
        tokenize_in(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    nodes = []
    for rank in range(2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "nodes"]
        launcher += ["--local-addr", "127.0.0.1", "--nproc-per-node", "1"]
        command = stage_command(launcher, stage, CONSTANTS[stage])
        nodes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL))
    return [node.wait(LIMIT) for node in nodes]


@pytest.mark.parametrize(
    ("stage", "moment"),
    [
        ("finetune", "os.mkdir .*/checkpoint-12$"),
        ("capture", "open .*/done/3.begun$"),
        ("measure", "open .*/finetuned/measures-.*part"),
    ],
)
def test_two_processes_two_nodes_and_a_run_after_a_kill_write_what_one_process_does(
    tmp_path: Path, tiny_bert: Path, stage: str, moment: str
) -> None:
    names, constants = ("alone", "pair", "nodes", "killed"), CONSTANTS[stage]
    alone, pair, nodes, killed = (prepared(tmp_path / name, stage, tiny_bert) for name in names)
    run_stage(alone, stage, constants=constants)
    run_stage(pair, stage, constants=constants, processes=2)
    assert_same(stage, pair, alone)
    assert run_two_nodes(nodes, stage) == [0, 0]
    assert_same(stage, nodes, pair if stage == "finetune" else alone)

    errors = run_stage(killed, stage, constants=constants, processes=2, kill_at=moment, kill_rank=1)
    assert "Signal 9 (SIGKILL)" in errors
    assert any((killed / UNFINISHED / stage).rglob("*"))
    run_stage(killed, stage, constants=constants, processes=2)
    if stage == "finetune":
        assert digest(killed / "models/finetuned") == digest(pair / "models/finetuned")
    assert_same(stage, killed, pair)
