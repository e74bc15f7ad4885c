"""`weights="init"` of every architecture of the zoo: equal to the plain model in constants and moments, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from autopart.capture.trained import Trained
from autopart.extras.weights.initial import initial_values, require_no_leftovers
from autopart.ir.errors import RefusedError

transformers = pytest.importorskip("transformers")
from benchmarks.shared.architectures import built, seeded  # noqa: E402
from benchmarks.zoo.models import ARCHITECTURES, SIZES  # noqa: E402

MORE = [  # with output layers tied to embeddings, and biases that a constructor makes
    ("CamembertForMaskedLM", {}), ("CamembertForCausalLM", {"is_decoder": True}), ("XLMRobertaForMaskedLM", {}),
    ("ApertusForCausalLM", {}), ("Data2VecTextForMaskedLM", {}), ("NystromformerForMaskedLM", {}),
    ("LongformerForMaskedLM", {"attention_window": 4}), ("FNetForMaskedLM", {}), ("RobertaForMaskedLM", {}),
    ("ReformerForMaskedLM", {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 8], "is_decoder": False}),
    ("MBartForConditionalGeneration", {}), ("ElectraForMaskedLM", {}),
]  # fmt: skip
EVERY = {**{a.name: (a.model, a.sizes) for a in ARCHITECTURES}, **dict((name, (name, own)) for name, own in MORE)}
SEEDS = (7, 8, 9)
SIGMA = 6
"""Standard errors by which a mean, or the logarithm of a spread, may differ: some 10,000 numbers are compared."""
REFUSED = 30
"""Architectures that may be refused for what their constructors draw, at most."""


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def problems(made: dict[str, torch.Tensor], plain: list[dict[str, torch.Tensor]]) -> list[str]:
    """Compare values with those of some plain models, which differ where they are drawn."""
    wrong = []
    for name in plain[0]:
        first, found = plain[0][name].detach(), made[name].detach()
        fixed = torch.ones_like(first, dtype=torch.bool)
        for other in plain[1:]:
            fixed &= (other[name] == first) | (other[name].isnan() & first.isnan())
        if not torch.equal(found[fixed], first[fixed]):
            wrong.append(f"{name}: {int((found[fixed] != first[fixed]).sum())} constants")
        drawn, own = torch.cat([each[name].detach()[~fixed] for each in plain]).double(), found[~fixed].double()
        if own.numel() < 8:
            continue
        spread = drawn.std()
        apart = float((own.mean() - drawn.mean()).abs() / spread) * own.numel() ** 0.5
        wider = abs(float((own.std() / spread).log())) * own.numel() ** 0.5
        wrong += [f"{name}: mean {apart:.1f}, spread {wider:.1f}"] if max(apart, wider) > SIGMA else []
    return wrong


def compared(name: str) -> list[str] | RefusedError:
    """Return what is wrong with the initial values of an architecture, or its refusal."""
    model, own = EVERY[name]
    make = lambda seed: seeded(lambda: built(model, SIZES, own), seed)  # noqa: E731
    plain = [tensors(make(seed)) for seed in SEEDS]
    with torch.device("meta"):
        empty = Trained(make(0))
    wanted = {name: tensor for name, tensor in tensors(empty.model).items() if tensor.is_meta}
    try:
        require_no_leftovers(empty, 0)
        made = initial_values(empty, wanted, 0, torch.device("cpu"))
    except RefusedError as error:
        return error
    return problems({**tensors(empty.model), **made}, plain)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_initial_values_of_the_zoo_are_those_of_the_plain_models_or_refused_by_name() -> None:
    warnings.simplefilter("ignore")
    wrong: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name in EVERY:
        found = compared(name)
        if isinstance(found, RefusedError):
            refused[name] = found.what
        elif found:
            wrong[name] = found[:5]
    print(f"{len(EVERY)} architectures: {len(EVERY) - len(wrong) - len(refused)} equal, {len(refused)} refused")
    print(*(f"{name}: {what}" for name, what in refused.items()), sep="\n")
    assert not wrong
    assert all("no initialisation of the model sets it" in each or "has not run" in each for each in refused.values())
    assert len(refused) <= REFUSED


@pytest.mark.parametrize("name", ["CamembertForMaskedLM", "vit_mae", "xlnet"])
def test_tied_rows_and_marked_modules_are_as_in_the_plain_model(name: str) -> None:
    found = compared(name)
    if name == "CamembertForMaskedLM":
        assert found == []
    else:  # their constructors set what their initialisation does not, or leave memory without values
        assert isinstance(found, RefusedError), found


def test_memory_that_a_constructor_leaves_is_refused_and_the_advice_works() -> None:
    make = lambda seed: seeded(lambda: built("XLNetLMHeadModel", SIZES, {}), seed)  # noqa: E731
    with torch.device("meta"):
        model = make(0)
    with pytest.raises(RefusedError, match=r"has memory, and the initialisation that sets it has not run"):
        require_no_leftovers(Trained(model), 0)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    require_no_leftovers(Trained(model), 0)
    for parameter in model.parameters():
        del parameter._is_hf_initialized
    model.to("meta")
    trained = Trained(model)
    require_no_leftovers(trained, 0)
    made = initial_values(trained, tensors(model), 0, torch.device("cpu"))
    assert not problems(made, [tensors(make(seed)) for seed in SEEDS])


def test_a_bias_that_a_constructor_makes_is_refused_and_the_advice_works() -> None:
    make = lambda seed: seeded(lambda: built("Data2VecTextForMaskedLM", SIZES, {}), seed)  # noqa: E731
    refusal = compared("Data2VecTextForMaskedLM")
    assert isinstance(refusal, RefusedError) and refusal.what.startswith("lm_head.bias has no value")
    assert "model.tie_weights()" in refusal.fix
    with torch.device("meta"):
        model = make(0)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros_like(model.lm_head.bias, device="cpu"))
    model.tie_weights()
    trained = Trained(model)
    require_no_leftovers(trained, 0)
    made = initial_values(trained, {n: t for n, t in tensors(model).items() if t.is_meta}, 0, torch.device("cpu"))
    assert not problems({**tensors(model), **made}, [tensors(make(seed)) for seed in SEEDS])
