"""Files of tensors are written as safetensors reads them, with their hash, and every change of a file is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autopart.cli.entry import main
from autopart.files.checkpoints.document import hashed
from autopart.files.checkpoints.tensor_files import TensorFiles, open_tensors, write_tensors
from autopart.ir.errors import CheckpointError

BASE = torch.randn(40, generator=torch.Generator().manual_seed(0))
KINDS = {
    "whole": BASE,
    "part of it": BASE[10:20],
    "transposed": BASE.view(5, 8).t(),
    "expanded": BASE[:1].expand(7),
    "empty": torch.zeros(0, 3),
    "number": torch.tensor(3.5),
    "int64": torch.arange(5),
    "bool": torch.tensor([True, False, True]),
    "bf16": BASE.bfloat16(),
    "fp16": BASE[:3].half(),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "conjugate": torch.complex(BASE[:4], BASE[4:8]).conj(),
    "negative": torch.complex(BASE[:4], BASE[4:8]).conj().imag,
    "a name in Norwegian: ærlig": torch.ones(1),
}


def test_any_dense_tensor_is_read_back_by_safetensors_itself(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    written = write_tensors(file, KINDS)
    assert written == hashed(file)
    found = load_file(file)
    assert found.keys() == KINDS.keys()
    for name, tensor in KINDS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert torch.equal(open_tensors(file).read("transposed"), KINDS["transposed"])


def test_a_file_of_many_pieces_and_one_without_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopart.files.checkpoints.tensor_files._PIECE", 64)
    large = {f"w{number}": BASE + number for number in range(10)}
    assert write_tensors(tmp_path / "large", large) == hashed(tmp_path / "large")
    assert all(torch.equal(tensor, large[name]) for name, tensor in load_file(tmp_path / "large").items())
    assert write_tensors(tmp_path / "none", {}) == hashed(tmp_path / "none")
    assert not TensorFiles([tmp_path / "none"]).by_name


def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="spin cannot be saved"):
        write_tensors(tmp_path / "file", {"spin": torch.zeros(2, dtype=torch.complex128)})


def code_of(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_the_command_names_every_changed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import autopart

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    folder = autopart.save_from(model, tmp_path / "runs", optimizer)
    assert code_of("checkpoint", "verify", tmp_path / "runs") == 0
    assert "3 files" in capsys.readouterr().out
    assert code_of("checkpoint", "export", folder, tmp_path / "weights") == 0
    assert torch.equal(load_file(tmp_path / "weights")["weight"], model.weight)
    assert code_of("checkpoint", "export", folder, tmp_path / "averages", "--averages") == 2
    assert "holds no averages" in capsys.readouterr().err
    state, weights = folder / "state-00001-of-00001.safetensors", folder / "model-00001-of-00001.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"\x7f")
    weights.unlink()
    assert code_of("checkpoint", "verify", folder) == 1
    said = capsys.readouterr()
    assert said.err.index("model-00001-of-00001.safetensors is missing") < said.err.index("state-00001-of-00001")
    assert "its SHA-256 is another" in said.err and "2 of them changed" in said.out
    assert code_of("checkpoint", "export", folder, tmp_path / "none") == 2 and not (tmp_path / "none").exists()


def test_a_checkpoint_is_verified_without_torch(tmp_path: Path) -> None:
    import autopart

    folder = autopart.save_from(torch.nn.Linear(4, 3), tmp_path)
    code = (
        "import sys\nfrom autopart.cli.entry import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, "checkpoint", "verify", folder], capture_output=True, text=True)
    assert done.returncode == 0 and "2 files" in done.stdout, done.stderr
