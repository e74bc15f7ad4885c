"""What people write by mistake, or by habit from other libraries: one of our errors says what to do, and that works.

Here are the mistakes that one process can show, besides impossible options (`test_api`), models that are refused
(`test_bad_input`, `e2e/models/test_advice`) and torch's own calls on a pipe (`test_torch_habits`).  Those between ranks
are in `test_mistakes_between_ranks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.documents.mistaken_arguments import OF_ARGUMENTS
from support.documents.mistaken_calls import OF_CALLS
from support.jobs.failures.rank_mistakes import MISTAKES as BETWEEN_RANKS
from support.models.misleading_models import ROWS, Net
from torch.utils.data import DataLoader, TensorDataset

import autopart
from autopart.ir.errors import AutopartError

ALL = OF_ARGUMENTS | OF_CALLS


class Setting:
    """What the calls are made with.  pipe: open, after a step.  closed: a closed one.  average: of the pipe.  made: a
    plan.  optimizer, scheduler: of the pipe.  other: an optimizer of another model."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"sample": ROWS, "micro_batches": 1, "costs": "analytic"}
        self.pipe = autopart.compile(Net(), "cpu:1", **options)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.other = torch.optim.AdamW(Net().parameters())
        self.pipe.step(ROWS)
        self.optimizer.step()
        self.average = autopart.AveragedModel(self.pipe)
        self.pipe.save("runs/a", self.optimizer)
        self.pipe.save("runs/w")
        torch.save(self.pipe.state_dict(), "state.pt")
        self.loader = DataLoader(TensorDataset(ROWS), batch_size=2)
        self.made = self.plan()
        autopart.save_plan(self.made, "plan.json")
        with autopart.compile(Net(), "cpu:1", **options) as self.closed:
            pass

    def plan(self, model: Any = None, cluster: Any = "cpu:2", **options: Any) -> Any:
        return autopart.plan(
            Net() if model is None else model, cluster, **{"sample": ROWS, "costs": "analytic", **options}
        )

    def again(self) -> None:
        with autopart.compile(self.closed.model, "cpu:1", sample=ROWS, costs="analytic") as pipe:
            pipe.step(ROWS)

    def averages(self) -> Any:
        with self.average.applied():
            return self.pipe.state_dict(), dict(self.pipe.named_parameters())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in {"model.pt": "x", "p.yaml": "a: 1", "empty.json": "{}", "c.yaml": "devices: []"}.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        setting = Setting()
        yield setting
        setting.pipe.close()


ATTRIBUTES = {
    "pipe.step(batch)": "forward backward generate fit loss evaluate validate test train_step training_step eval_batch",
    "pipe.save(": "save_checkpoint save_state",
    "pipe.load(": "load_checkpoint load_state",
    "pipe.rank": "local_rank process_index",
    "before compile": "to cuda cpu half float double bfloat16 gradient_checkpointing_enable",
    "pipe.model": "module share_memory register_forward_hook apply get_submodule add_module requires_grad_ type",
    "scale=1 / n": "no_sync",
    "pipe.world_size": "size",
    "pipe.cluster": "device",
    "docs/pipe.md": "dtype config optimizer hf_device_map lr_scheduler logger push_to_hub unshard",
}
"""A word of the fix, and the attributes of other wrappers that have it."""
OPTIONS = {
    "sample=": "batch_size train_batch_size", "stages=": "num_stages pp_size", "cluster=": "device_map device_ids",
    "micro_batches=": "gradient_accumulation_steps chunks", "zero=": "fsdp", "precision=": "dtype mixed_precision",
    "drop it": "find_unused_parameters broadcast_buffers", "cluster file": "max_memory",
}  # fmt: skip
"""A word of the fix, and the options of other libraries that have it."""


@pytest.mark.parametrize("name", ALL)
def test_a_mistake_is_refused_with_a_way_out_that_works(made: Setting, name: str) -> None:
    call, word, instead = ALL[name]
    with pytest.raises(AutopartError) as caught:
        call(made)
    assert word in caught.value.fix, str(caught.value)
    assert "\n" not in caught.value.what and len(caught.value.what) < 160
    if instead is not None:
        instead(made)


def test_attributes_and_options_of_other_libraries_are_refused_with_ours(made: Setting) -> None:
    for word, names in ATTRIBUTES.items():
        for name in names.split():
            with pytest.raises(AutopartError, match=f"no attribute '{name}'") as caught:
                getattr(made.pipe, name)
            assert word in caught.value.fix, str(caught.value)
    for word, names in OPTIONS.items():
        for name in names.split():
            with pytest.raises(AutopartError, match=f"no option {name}=") as caught:
                made.plan(**{name: 1})
            assert word in caught.value.fix, str(caught.value)


def test_after_all_mistakes_the_pipe_trains_as_before(made: Setting) -> None:
    plain, loss = Net(), made.pipe.step(ROWS)
    plain.load_state_dict(made.pipe.state_dict())
    assert loss.item() == pytest.approx(plain(ROWS).item(), rel=1e-6)
    assert not list(Path().glob("x*"))  # what was refused has left no file


def test_the_page_of_errors_says_how_many_kinds_of_mistakes_are_tried() -> None:
    page = (Path(__file__).parents[2] / "docs/errors.md").read_text()
    assert f"{len(ALL) + len(BETWEEN_RANKS)} kinds of mistakes" in page
    assert len(ALL) + len(BETWEEN_RANKS) >= 155
