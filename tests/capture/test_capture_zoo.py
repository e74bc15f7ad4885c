"""Capture of real architectures: names, ties, caches, and silence when nothing is lost."""

from __future__ import annotations

import torch
from support.models.zoo import CASES

from autopart.batch.batch import flatten
from autopart.capture import capture


def test_a_cache_of_the_model_is_not_part_of_the_program():
    model = CASES["llama"].model()
    model.config.use_cache = True
    graph = capture(model, flatten(CASES["llama"].data(2))).graph
    assert len(graph.outputs) == 1
    assert not [op for op in graph.ops if op.module.endswith("cache")]


def test_parameters_keep_the_users_names_and_tied_ones_the_first():
    model = CASES["gpt2"].model()
    graph = capture(model, flatten(CASES["gpt2"].data(2))).graph
    own = {name for name, _ in model.named_parameters()}
    assert {p.name for p in graph.params if p.kind == "param"} == own
    assert "transformer.wte.weight" in own and "lm_head.weight" not in own


def test_tied_parameters_are_found_on_the_meta_device_without_memory():
    with torch.device("meta"):
        model = CASES["llama_tied"].make(0.0)
    graph = capture(model, flatten(CASES["llama_tied"].data(2))).graph
    users = [op.module for op in graph.ops if "model.embed_tokens.weight" in op.params]
    assert len(users) == 2
    assert all(p.is_meta for p in model.parameters())


def test_capture_says_nothing_when_nothing_is_lost(capfd):
    for name in ("t5", "resnet"):  # that a warning is an error holds for every test
        capture(CASES[name].model(), flatten(CASES[name].data(2)))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
