"""The tensor functions on a pretended GPU, which raises where a tensor stays on the CPU.

torch's builds without CUDA do not let fake tensors of device `cuda` be indexed; a device of Python's own does as well.
Derivatives are left out: `torch.func` does not work on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import plain_document
from families import KINDS as COMMON
from families import write_family
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoConfig, AutoModel

from attnmix.core.names import POINTS, PREACTIVATION, Site
from attnmix.measures.contributions import contributions, layer_contributions
from attnmix.measures.controls import ControlValues, attended, control_ratios
from attnmix.measures.derivatives import document_chains
from attnmix.measures.document_blocks import DocumentBlock
from attnmix.measures.geometry import Cloud, Words, geometry_but_rank, step_measures
from attnmix.measures.identities import identity_errors, vector_errors
from attnmix.measures.layers import LayerPass, run_layers
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS, all_parts, mixing_ratios
from attnmix.models.attention import OBSERVED
from attnmix.models.capture_points import widths
from attnmix.models.families import PROJECTED, family_of

_setup_privateuseone_for_python_backend("pretended")
DEVICE = torch.device("pretended")
KINDS = ("albert", "modernbert", "gpt2", "opt", "gemma3_text", "olmo2")  # for the longer tier


def everything(base: Any, folder: Path, ids: torch.Tensor) -> None:
    """Compute all that `measure` makes of a batch and of a document, on the device of `ids`."""
    family, mask = family_of(base.config), torch.ones_like(ids)
    methods = family.present(RATIOS)
    declared = [LAYER_MATRICES[name] for name in family.present(LAYER_MATRICES)]
    by_layer: list[dict[str, torch.Tensor]] = []

    def visit(seen: LayerPass, features: Mapping[Site, torch.Tensor]) -> None:
        made = [*mixing_ratios(methods, seen), identity_errors(seen, mask.bool()), seen.attention.to_first()]
        made.append(vector_errors(seen.x, features[Site(seen.call.number, "layer_output")], mask.bool()))
        block = DocumentBlock([plain_document(range(9))], slice(0, 1), ids.device)
        made.append(block.sums(step_measures(seen)))
        words = Words(seen.x, np.arange(9)[None])
        cloud = Cloud(seen.features["layer_output"][:, None], mask.bool()[:, None])
        made.append(geometry_but_rank(cloud, Cloud(seen.x[:, None], mask.bool()[:, None]), words))
        bias = seen.value.new_zeros(seen.value.shape[-1])
        values = ControlValues(bias, seen.value, block.means(seen.value))
        made += [*attended(seen.attention, seen.value)[0], control_ratios(methods, seen, all_parts(seen), values)]
        by_layer.append(layer_contributions(declared, seen.document(0)))
        assert all(tensor.device.type == ids.device.type for tensor in (*made, *by_layer[-1].values()))

    with torch.no_grad():
        run_layers(base, {"input_ids": ids, "attention_mask": mask}, visit, (*POINTS, PROJECTED, PREACTIVATION))
        found = contributions(declared, by_layer)
        chains = document_chains(base, ids[:1])
        assert widths(base)
    summed = [chain.start_TW for chain in chains]
    assert all(tensor.device.type == ids.device.type for tensor in (*found.values(), *summed))


def on_device(base: Any) -> None:
    """Put tensors without numbers, on the pretended device, in the place of the model's."""
    for module in base.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
                    held[name] = torch.nn.Parameter(moved) if isinstance(tensor, torch.nn.Parameter) else moved


@pytest.mark.parametrize("name", ["bert", *COMMON, *(pytest.param(each, marks=pytest.mark.families) for each in KINDS)])
def test_no_tensor_stays_behind_on_the_cpu(name: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_family(name, tmp_path))
    config.use_cache = False
    base = AutoModel.from_config(config, attn_implementation=OBSERVED).eval()
    with FakeTensorMode(), torch.no_grad():
        on_device(base)
        ids = torch.ones(1, 9, dtype=torch.long, device=DEVICE)
        everything(base, tmp_path, ids)


def test_a_tensor_that_stays_behind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def left(_module: Any, _arguments: Any) -> tuple[torch.Tensor]:
        return (torch.ones(1, 9, 24, device="cpu"),)

    config = AutoConfig.from_pretrained(write_family("bert", tmp_path))
    base = AutoModel.from_config(config, attn_implementation=OBSERVED).eval()
    with FakeTensorMode(), torch.no_grad():
        on_device(base)
        base.encoder.layer[1].register_forward_pre_hook(left)
        with pytest.raises(RuntimeError, match="device"):
            everything(base, tmp_path, torch.ones(1, 9, dtype=torch.long, device=DEVICE))
