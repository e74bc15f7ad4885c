"""Values of a model from files: what is checked of the headers, and what is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import autopart
from autopart.extras.weights.source import StoredValues
from autopart.ir.errors import CheckpointError

CPU = torch.device("cpu")
VALUES = {"embed.weight": torch.randn(16, 8), "out.bias": torch.randn(4), "count": torch.tensor(7)}
NAMES = {"embed.weight": ["embed.weight", "head.weight"], "out.bias": ["out.bias"], "count": ["count"]}


def wanted(**other: torch.Tensor) -> dict[str, torch.Tensor]:
    made = {name: torch.empty_like(value, device="meta") for name, value in VALUES.items()}
    return {**made, "embed.weight": nn.Parameter(made["embed.weight"]), **other}


def stored(path: Path, tensors: dict[str, torch.Tensor] = VALUES) -> StoredValues:
    save_file(tensors, path / "model.safetensors")
    return StoredValues(path)


def test_a_file_a_folder_and_an_index_give_the_same_values(tmp_path) -> None:
    save_file({"embed.weight": VALUES["embed.weight"]}, tmp_path / "a.safetensors")
    save_file({"out.bias": VALUES["out.bias"], "count": VALUES["count"]}, tmp_path / "b.safetensors")
    folder = StoredValues(tmp_path)
    index = {"weight_map": {"embed.weight": "a.safetensors", "out.bias": "b.safetensors", "count": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = tmp_path / "whole" / "x.safetensors"
    whole.parent.mkdir()
    save_file(VALUES, whole)
    for source in (folder, StoredValues(tmp_path), StoredValues(whole)):
        source.require(wanted(), NAMES)
        made = source.values(wanted(), CPU)
        assert all(torch.equal(made[name], value) for name, value in VALUES.items())
        assert isinstance(made["embed.weight"], nn.Parameter) and made["embed.weight"].requires_grad


def test_floats_become_of_the_dtype_of_the_model(tmp_path) -> None:
    large = {**VALUES, "embed.weight": torch.randn(3000, 1500).bfloat16()}  # several pieces
    source = stored(tmp_path, large)
    like = torch.empty(3000, 1500, dtype=torch.float64, device="meta")
    source.require(wanted(**{"embed.weight": like}), NAMES)
    made = source.values({"embed.weight": like}, CPU)
    assert torch.equal(made["embed.weight"], large["embed.weight"].double())


def test_a_tied_weight_may_be_stored_under_another_name(tmp_path) -> None:
    source = stored(tmp_path, {"head.weight": VALUES["embed.weight"], "out.bias": VALUES["out.bias"]})
    own = {name: tensor for name, tensor in wanted().items() if name != "count"}
    source.require(own, NAMES)
    assert torch.equal(source.values(own, CPU)["embed.weight"], VALUES["embed.weight"])


def test_what_the_model_lacks_is_a_warning(tmp_path) -> None:
    with pytest.warns(UserWarning, match="1 tensors in .* are not in the model, such as more"):
        stored(tmp_path, {**VALUES, "more": torch.ones(1)}).require(wanted(), NAMES)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"out.bias": torch.empty(5, device="meta")}, r"out\.bias has shape \(4,\) there, and \(5,\) in the model"),
        ({"count": torch.empty((), device="meta")}, r"count is of torch\.int64 there, and of torch\.float32"),
        ({"gone": torch.empty(3, device="meta")}, r"gone is missing"),
        ({"bias": torch.empty(4, device="meta")}, r"bias is missing \(there is out\.bias"),
    ],
)
def test_other_weights_than_the_models_are_refused_by_name(tmp_path, other, says) -> None:
    names = {**NAMES, **{name: [name] for name in other}}
    with pytest.raises(CheckpointError, match=says):
        stored(tmp_path).require(wanted(**other), names)


def test_files_that_are_missing_cut_or_of_another_format_are_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        StoredValues(tmp_path / "none")
    stored(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        StoredValues(tmp_path)
    file.write_bytes(b"\x80\x04" + whole)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        StoredValues(file)


def test_a_file_that_is_cut_after_it_was_checked_is_refused(tmp_path) -> None:
    source = stored(tmp_path)
    source.require(wanted(), NAMES)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="the file ends before the tensor does"):
        source.values(wanted(), CPU)


def test_a_changed_checkpoint_is_refused(tmp_path) -> None:
    model = nn.Linear(4, 4)
    folder = autopart.save_from(model, tmp_path)
    source = StoredValues(tmp_path)
    like = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.named_parameters()}
    source.require(like, {name: [name] for name in like})
    assert torch.equal(source.values(like, CPU)["weight"], model.weight)
    file = next(folder.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="was changed since it was written"):
        source.values(like, CPU)
