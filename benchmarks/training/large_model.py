"""A model that no rank can hold: host memory of each rank while it compiles from the meta device, trains and saves.

A Llama of 4.2 GB (20 layers of width 2,048, fp32) on two Gloo ranks, each limited to 3.2 GB of private memory
(RLIMIT_DATA).  Its weights lie in a Hugging Face folder.  It is cut in the middle.  Norms and the head are trained, so
that gradients flow through both stages and Adam's state fits beside the frozen weights.  Asked: building the model
whole fails under that limit; the ranks compile it from the meta device, train and save; the losses are those of the
whole model, trained without a limit; the peak of the host memory of a rank (VmHWM: also libraries and pages of files)
is at most 1.15 times its share + 600 MB.  Its share: the weights that it holds, gradients, and the optimizer's state.
None of this depends on the other load of the machine.

    python -m benchmarks.training.large_model               3 minutes on 2 cores, 15 GB; writes results/large_model.json
    python -m benchmarks.training.large_model --layers 2    small, without the failure; writes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import autopart
from benchmarks.shared.common import ROOT, write

LIMIT, SLACK, FACTOR = 3_200_000_000, 600_000_000, 1.15
ROWS, TOKENS, STEPS, VOCABULARY = 4, 16, 3, 8192


def model(layers: int) -> Any:
    """Return the model, on the default device, of which norms and head are trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=5504, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, tie_word_embeddings=False,
    )  # fmt: skip
    built = LlamaForCausalLM(config)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_("norm" in name or name.startswith("lm_head"))
    return built.train()


def batch() -> dict[str, Any]:
    """Return token ids that are their own labels."""
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def write_weights(folder: Path, layers: int) -> int:
    """Write random weights, one file for each layer, and their index; returns their bytes."""
    with torch.device("meta"):
        state = model(layers).state_dict()
    files: dict[str, list[str]] = {}
    for name in state:
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    generator = torch.Generator().manual_seed(0)
    for file, names in files.items():
        made = {}
        for name in names:
            shape = state[name].shape
            made[name] = (
                torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0, 0.02, generator=generator)
            )
        save_file(made, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(tensor.nbytes for tensor in state.values())


def limit_memory() -> None:
    """Limit the private memory of this process."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))


def status(key: str) -> int:
    """Return a number of bytes of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def whole(layers: int) -> str:
    """Build the whole model under the limit, in a process of its own; returns what it raises, "" if nothing."""
    code = f"from benchmarks.training import large_model as m; m.limit_memory(); m.model({layers})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def train(folder: str, out: str, layers: int) -> dict[str, Any]:
    """Compile, train and save on one rank; returns its bytes, seconds and losses."""
    torch.set_num_threads(1)
    limit_memory()
    before = status("VmHWM")
    with torch.device("meta"):
        empty = model(layers)
    with autopart.compile(
        empty,
        "cpu:2",
        sample=batch(),
        weights=folder,
        cuts=[f"model.layers.{layers // 2}"],
        micro_batches=ROWS,
        optimizer="adam",
    ) as pipe:
        compiled = status("VmHWM")
        optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(float(pipe.step(batch())))
            optimizer.step()
        trained = status("VmHWM")
        pipe.save(out, optimizer)
        state = [t for each in optimizer.state.values() for t in each.values() if isinstance(t, torch.Tensor)]
        held = list(pipe.session.tensors.held.values())
        gradients = [t.grad for t in held if t.grad is not None]
        weights, more = sum(t.nbytes for t in held), sum(t.nbytes for t in (*gradients, *state))
        return {
            "share bytes": weights + more, "weights bytes": weights,
            "peak bytes": status("VmHWM"), "peak before": before, "peak after compile": compiled,
            "peak after training": trained, "private bytes": status("VmData"),
            "losses": losses, "costs": pipe.plan.provenance.costs,
        }  # fmt: skip


def plain(folder: str, layers: int) -> list[float]:
    """Train the whole model in this process, without a limit; returns the losses."""
    trained = model(layers)
    for file in Path(folder).glob("*.safetensors"):
        trained.load_state_dict(load_file(file), strict=False)
    optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = trained(**batch()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        weights, out = Path(folder) / "weights", Path(folder) / "out"
        weights.mkdir()
        size = write_weights(weights, given.layers)
        failure = whole(given.layers)
        print(f"model of {size / 1e9:.2f} GB; built whole under {LIMIT / 1e9} GB: {failure or 'it fits'}", flush=True)
        ranks = autopart.launch(train, "cpu:2", str(weights), str(out), given.layers)
        saved = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
        losses = plain(str(weights), given.layers)
    for rank in ranks:
        rank["allowed bytes"] = int(FACTOR * rank["share bytes"] + SLACK)
        print("  ", {key: round(value / 1e9, 3) for key, value in rank.items() if "bytes" in key or "peak" in key})
    off = max(abs(a / b - 1) for a, b in zip(ranks[0]["losses"], losses, strict=True))
    within = all(rank["peak bytes"] <= rank["allowed bytes"] for rank in ranks)
    print(f"peaks within what is asked: {within}; losses off by {off:.1e}; {saved / 1e9:.2f} GB saved")
    if given.layers == parser.get_default("layers"):
        content = {
            "model bytes": size, "limit bytes": LIMIT, "built whole": failure, "ranks": ranks, "saved bytes": saved,
            "losses of the whole model": losses, "losses off by": off, "within": within,
        }  # fmt: skip
        print("written to", write("large_model", content).name)


if __name__ == "__main__":
    main()
