"""Models from configuration files: what is built, what is planned, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

import autopart
from autopart.cli.main import main
from autopart.extras.shelf.build import from_shelf
from autopart.extras.shelf.config_file import read_config
from autopart.ir.errors import UsageError

PUBLISHED = Path(__file__).parents[2] / "support/shelf"
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 16,
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **TEXT}
VIT = {
    "architectures": ["ViTModel"], "model_type": "vit", "image_size": 32, "patch_size": 8,
    **{name: TEXT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
}  # fmt: skip
MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 16}
MOE |= {"num_key_value_heads": 1, "num_experts_per_tok": 2}
T5 = {"architectures": ["T5WithLMHeadModel"], "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 48}
T5 |= {"num_layers": 2, "num_heads": 2, "vocab_size": 64, "decoder_start_token_id": 0, "pad_token_id": 0}
RESNET = {"architectures": ["ResNetForImageClassification"], "model_type": "resnet", "embedding_size": 8}
RESNET |= {"hidden_sizes": [8, 16], "depths": [1, 1]}


@pytest.fixture
def written(tmp_path):
    """Writes a configuration to a file."""

    def write(content: object) -> Path:
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.mark.parametrize(
    ("content", "built", "batch"),
    [
        (LLAMA, "LlamaForCausalLM", {"input_ids": (4, 8), "labels": (4, 8)}),
        (LLAMA | {"architectures": None}, "LlamaForCausalLM", {"input_ids": (4, 8), "labels": (4, 8)}),
        (MOE, "Qwen3MoeForCausalLM", {"input_ids": (4, 8), "labels": (4, 8)}),
        ({"model_type": "bert", **TEXT}, "BertForMaskedLM", {"input_ids": (4, 8), "labels": (4, 8)}),
        (
            {"architectures": ["BertForSequenceClassification"], **TEXT},
            "BertForSequenceClassification",
            {"input_ids": (4, 8), "labels": (4,)},
        ),
        (
            {"architectures": ["BertForQuestionAnswering"], **TEXT},
            "BertForQuestionAnswering",
            {"input_ids": (4, 8), "start_positions": (4,), "end_positions": (4,)},
        ),
        (T5, "T5ForConditionalGeneration", {"input_ids": (4, 8), "labels": (4, 8)}),
        (VIT, "ViTForImageClassification", {"pixel_values": (4, 3, 32, 32), "labels": (4,)}),
        (RESNET, "ResNetForImageClassification", {"pixel_values": (4, 3, 224, 224), "labels": (4,)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_becomes_the_model_that_transformers_would_make_and_a_batch_with_a_loss(written, content, built, batch):
    file = read_config(written(content))
    model, made, _ = from_shelf(file, 4, 8 if "input_ids" in batch else None)
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == batch
    assert type(model).__name__ == built and model.training
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    family = type(model.config)
    wanted = getattr(transformers, built)(family.from_dict({**content, "torch_dtype": None}))
    assert wanted(**{name: torch.zeros_like(tensor, device="cpu") for name, tensor in made.items()}).loss.isfinite()
    assert {n: p.shape for n, p in wanted.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert model.dtype == getattr(torch, content.get("torch_dtype", "float32"))


def test_a_folder_is_planned_as_its_model_is(written, capsys):
    words = [
        "plan",
        str(written({**LLAMA, "torch_dtype": None}).parent),
        "--rows",
        "8",
        "--tokens",
        "16",
        "--stages",
        "2",
        "--json",
    ]
    with pytest.raises(SystemExit) as end:
        main([*words, "--cluster", "h100x8"])
    assert end.value.code == 0
    facts = json.loads(capsys.readouterr().out)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, use_cache=False))
        batch = {name: torch.zeros(8, 16, dtype=torch.long) for name in ("input_ids", "labels")}
    plan = autopart.plan(model, "h100x8", sample=batch, stages=2)
    assert facts["step_ns"] == plan.step_ns
    assert [stage["ranks"] for stage in facts["stages"]] == [list(stage.ranks) for stage in plan.stages]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", "describes no model"),
        ("{}", "neither model_type nor architectures"),
        ({"architectures": ["../../etc/passwd"]}, "architectures[0]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({**LLAMA, "text_config": {"num_experts": 10**5}}, "text_config.num_experts"),
        ({**LLAMA, "hidden_size": 2**62}, "hidden_size"),
        ({**LLAMA, "hidden_size": "wide"}, "LlamaConfig refuses it"),
        ({**LLAMA, "torch_dtype": "int7"}, "torch_dtype"),
        ({**LLAMA, "hidden_size": -4}, "cannot be built"),
        ({**LLAMA, "backbone": "resnet50"}, "backbone"),
        ({"architectures": ["MyOwnModel"], "model_type": "mine"}, "MyOwnModel cannot be planned from"),
        ({"architectures": ["Wav2Vec2ForCTC"], "model_type": "wav2vec2"}, "Wav2Vec2ForCTC cannot be planned from"),
        ({"architectures": ["PreTrainedModel"], "model_type": "llama"}, "PreTrainedModel cannot be planned from"),
        (LLAMA | {"pad": " " * 5 * 2**20}, "too large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_describes_no_model_is_refused_by_name(written, content, words):
    with pytest.raises(UsageError) as error:
        from_shelf(read_config(written(content)), 4, 8)
    assert words in str(error.value)
    assert "config.json" in str(error.value) or "cannot be planned from" in words


@pytest.mark.parametrize(
    ("content", "lengths", "words"),
    [
        (LLAMA, (None, 8), "add --rows"),
        (LLAMA, (4, None), "add --tokens"),
        (LLAMA, (4, 17), "use at most --tokens 16"),
        (VIT, (4, 8), "drop --tokens"),
        (RESNET | {"image_size": {"height": 32, "width": 32}}, (4, None), "image_size"),
        (RESNET | {"image_size": -4}, (4, None), "image_size"),
        (RESNET | {"image_size": [4, 4, 4]}, (4, None), "image_size"),
    ],
)
def test_lengths_that_are_missing_or_impossible_are_refused(written, content, lengths, words):
    with pytest.raises(UsageError, match=words):
        from_shelf(read_config(written(content)), *lengths)


def test_code_beside_a_file_is_never_read(written, tmp_path, monkeypatch):
    content = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}, "trust_remote_code": True}
    path = written({**content, "_attn_implementation": "someone/kernel", "attn_implementation": "someone/kernel"})
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('was read')\n")
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    model, _, notes = from_shelf(read_config(path), 4, 8)
    assert "modeling_own" not in {name.rpartition(".")[2] for name in set(sys.modules) - before}
    assert model.config._attn_implementation == "sdpa" and any("auto_map" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lengths", "cluster", "billions"),
    [
        ("llama-3-8b", ("--tokens", "4096", "--rows", "512"), "h100x8:8", 8.03),
        ("llama-3-70b", ("--tokens", "4096", "--rows", "512"), "h100x8:16", 70.55),
        ("qwen3-30b-a3b", ("--tokens", "4096", "--rows", "512"), "h100x8:8", 30.53),
        ("t5-11b", ("--tokens", "512", "--rows", "512"), "a100x8:4", 11.31),
        ("vit-huge-patch14-224-in21k", ("--rows", "2048"), "h100x8", 0.63),
        ("bert-large", ("--tokens", "512", "--rows", "256"), "a100x8", 0.335),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_configurations_are_planned_from_the_file_alone(name, lengths, cluster, billions, capsys, tmp_path):
    words = ["plan", str(PUBLISHED / f"{name}.json"), *lengths, "--cluster", cluster, "--json", "--no-cache"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(tmp_path / "plan.json")])
    assert end.value.code == 0
    facts = json.loads(capsys.readouterr().out)
    plan = autopart.load_plan(tmp_path / "plan.json")
    assert facts["step_ns"] == plan.step_ns > 0 and plan.decision.world == facts["world"]
    file = read_config(PUBLISHED / f"{name}.json")
    rows = int(lengths[lengths.index("--rows") + 1])
    model, _, _ = from_shelf(file, rows, int(lengths[1]) if "--tokens" in lengths else None)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == round(billions, 2)
