"""What forward() does that changes no number is left out of the program."""

from __future__ import annotations

import torch
from support.documents.advice import Net, X
from torch import nn

from autopart.batch.batch import flatten
from autopart.capture import capture


def _converting(m: Net, x: torch.Tensor) -> torch.Tensor:
    m.layers[0] = m.layers[0].to(torch.float32)
    m.layers[1] = m.layers[1].cpu()
    return m.run(x).mean()


def _distributed(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.run(x)
    chosen = torch.distributions.Categorical(logits=hidden).log_prob(torch.zeros(len(x)))
    return -(torch.distributions.Normal(hidden, hidden.exp()).log_prob(x).mean() + chosen.mean())


def test_a_conversion_to_what_it_is_and_checks_of_distributions_leave_the_program_alone():
    validates, convert = torch.distributions.Distribution._validate_args, nn.Module._apply
    for body in (_converting, _distributed):
        model = Net(body)
        layers, weights = list(model.layers), [p.clone() for p in model.parameters()]
        captured = capture(model, flatten(X))
        assert list(model.layers) == layers
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
        assert {p.name for p in captured.graph.params if p.trainable} == {n for n, _ in model.named_parameters()}
        found = captured.module(*(captured.tensors[captured.names.params[n.name]] for n in _held(captured)), X)[-1]
        torch.testing.assert_close(found, model(X))
    assert torch.distributions.Distribution._validate_args is validates and nn.Module._apply is convert


def _held(captured) -> list:
    nodes = captured.module.graph.nodes
    return [node for node in nodes if node.op == "placeholder" and node.name in captured.names.params]
