"""The model's own initialisation, run for some of its tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopart.capture.trained import Trained
from autopart.extras.weights.initial import initial_values, require_initialiser
from autopart.ir.errors import RefusedError

CPU = torch.device("cpu")


class Positions(nn.Module):
    """Has a buffer that is not saved, and sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.empty(6, dtype=torch.long), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.numbers.copy_(torch.arange(6))


class Block(nn.Module):
    """A layer whose second weight is set again by the block around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.second.weight, std=0.001)


class Net(nn.Module):
    """Has tied weights, and a rule for all its modules."""

    def __init__(self, cls: type[nn.Module] = Positions) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(16, 8), cls()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 5.0, 0.01)


def net(**options) -> Trained:
    with torch.device("meta"):
        return Trained(Net(**options))


def wanted(model: Trained) -> dict[str, torch.Tensor]:
    return {name: t for pairs in (model.named_parameters(), model.named_buffers()) for name, t in pairs}


def test_values_are_those_of_the_models_own_initialisation() -> None:
    model = net()
    require_initialiser(model, wanted(model), 0)
    made = initial_values(model, wanted(model), 0, CPU)
    assert made["embed.weight"].mean().item() == pytest.approx(5.0, abs=0.1)
    assert torch.equal(made["positions.numbers"], torch.arange(6))
    assert made["blocks.0.first.weight"].abs().max() <= 8**-0.5 and made["blocks.0.first.weight"].std() > 0.1
    assert made["blocks.1.second.weight"].std() < 0.002
    assert torch.equal(made["blocks.1.norm.running_var"], torch.ones(8))
    assert isinstance(made["embed.weight"], nn.Parameter) and not isinstance(made["positions.numbers"], nn.Parameter)
    assert all(tensor.is_meta for tensor in wanted(model).values())


def test_a_value_does_not_depend_on_what_else_is_wanted() -> None:
    model = net()
    names = wanted(model)
    whole = initial_values(model, names, 3, CPU)
    before = torch.get_rng_state()
    for name, tensor in names.items():
        assert torch.equal(initial_values(model, {name: tensor}, 3, CPU)[name], whole[name]), name
    assert torch.equal(torch.get_rng_state(), before)
    other = initial_values(model, names, 4, CPU)
    assert not torch.equal(other["blocks.0.first.weight"], whole["blocks.0.first.weight"])
    assert not torch.equal(whole["blocks.0.first.weight"], whole["blocks.1.first.weight"])


def test_a_tied_weight_has_the_value_of_its_first_module() -> None:
    model = net()
    made = initial_values(model, {"embed.weight": model.model.embed.weight}, 0, CPU)
    assert made["embed.weight"].mean().item() == pytest.approx(5.0, abs=0.1)
    assert model.model.head.weight is model.model.embed.weight


class Unset(nn.Module):
    """Has a parameter that only the constructor sets."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class PartlySet(Unset):
    """Sets one element."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale[0])


class Asking(Unset):
    """Reads a number of a tensor."""

    def reset_parameters(self) -> None:
        if self.scale.sum() > 0:
            nn.init.ones_(self.scale)


class Drawing(Unset):
    """Draws from its own generator."""

    def reset_parameters(self) -> None:
        self.scale.uniform_(generator=torch.Generator(self.scale.device.type if not self.scale.is_meta else "cpu"))


class Replacing(Unset):
    """Makes another parameter of the same name, and an attribute."""

    def reset_parameters(self) -> None:
        self.scale, self.seen = nn.Parameter(torch.full((3,), 7.0)), True


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (Unset, r"positions\.scale has no value.*Unset.*reset_parameters"),
        (PartlySet, r"positions\.scale has no value"),
        (Asking, r"initialisation of positions \(Asking\) failed"),
        (Drawing, r"positions draws from a generator of its own"),
    ],
)
def test_what_an_initialisation_does_not_set_is_refused_by_name(cls, says) -> None:
    model = net(cls=cls)
    with pytest.raises(RefusedError, match=f"(?s){says}"):
        require_initialiser(model, wanted(model), 0)


def test_a_parameter_that_is_replaced_gives_its_value_and_the_module_stays_as_it_was() -> None:
    model = net(cls=Replacing)
    before = dict(vars(model.model.positions))
    require_initialiser(model, wanted(model), 0)
    made = initial_values(model, wanted(model), 0, CPU)
    assert made["positions.scale"].tolist() == [7.0] * 3
    assert vars(model.model.positions) == before and model.model.positions.scale.is_meta


def test_values_of_the_model_are_not_written_to() -> None:
    model = net()
    model.model.blocks[0].first = nn.Linear(8, 8)
    own = model.model.blocks[0].first.weight.detach().clone()
    initial_values(model, {"blocks.0.second.weight": model.model.blocks[0].second.weight}, 0, CPU)
    assert torch.equal(model.model.blocks[0].first.weight, own)
