"""Every causal model of the zoo in token slices on one, two and four processes, with other features of a pipeline.

Models that cannot be sliced are refused with the reason, and trained on whole sequences with token_slices="auto". One
pool of processes runs the grid and keeps its captures.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.jobs.slice_jobs import half_precision, kept, shorter_sequences, sliced, trained, trained_whole
from support.models.causal_zoo import BY_HAND, REFUSED
from support.workers import Workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
OF_16, OF_12 = (7, 5, 3, 1), (5, 4, 2, 1)
EXACT, ROUNDED, SINGLE = 1e-10, 1e-6, 1e-5  # fp64; a softmax in fp32; all of it in fp32
MODELS = {
    **dict.fromkeys(
        ("llama", "llama_tied", "llama_packed", "mistral", "mistral_packed", "qwen3", "gpt2", "gpt2_eager", "gpt_neox",
         "opt", "phi", "falcon", "olmo2", *BY_HAND), EXACT,
    ),
    **dict.fromkeys(("llama_eager", "mistral_eager", "gemma2", "bloom", "gptj", "gpt_neo"), ROUNDED),
    **dict.fromkeys(("mixtral", "qwen3_moe"), SINGLE),
}  # fmt: skip
"""Models, with right padding and labels of -100 or packed documents, and the allowed gradient error."""


@pytest.fixture(scope="module")
def single() -> Iterator[Workers]:
    with Workers(1, timeout=240) as pool:
        yield pool


def lengths_of(name: str) -> tuple[int, ...]:
    return OF_12 if name in BY_HAND else OF_16


def check(
    pool: Workers, name: str, stages: int, schedule: str, micros: int, rows: int, replicas: tuple[int, ...] | int = 1
) -> None:
    dtype = "float32" if MODELS[name] == SINGLE else "float64"
    job = (name, lengths_of(name), stages, schedule, micros, rows, dtype, (), replicas, False)
    losses, found, _ = zip(*pool.run(sliced, *job), strict=True)
    print(f"{name} {job[2:6]} {job[8]} {found[0].gradient:.2e} {found[0].worst}")  # shown by pytest -s
    assert len(set(losses)) == 1
    assert found[0].gradient <= MODELS[name] and found[0].buffer <= 1e-12, found[0]
    assert abs(found[0].loss) <= 1e-6, found[0]  # transformers computes the loss in fp32


@pytest.mark.parametrize("name", MODELS)
def test_slices_in_one_process_are_exact(single: Workers, name: str) -> None:
    check(single, name, 1, "1f1b", 1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_slices_over_two_stages_are_exact(pair: Workers, name: str) -> None:
    check(pair, name, 2, "1f1b", 1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_slices_over_four_stages_are_exact(workers: Workers, name: str) -> None:
    check(workers, name, 4, "gpipe", 1, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "mistral_packed", "convolved_and_shifted", "outer_products"])
def test_two_micro_batches_of_slices_are_exact(pair: Workers, name: str, schedule: str) -> None:
    check(pair, name, 2, schedule, 2, 4)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["llama_tied", "documents"])
def test_slices_with_replicas_are_exact(workers: Workers, name: str, replicas: tuple[int, ...]) -> None:
    check(workers, name, 2, "1f1b", 2, 8, replicas=replicas)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama_tied", {"stages": 2, "schedule": "1f1b"}),
        ("gpt2", {"stages": 4, "schedule": "gpipe"}),
        ("convolved_and_shifted", {"stages": 4, "schedule": "1f1b"}),
        ("llama_tied", {"stages": 2, "schedule": "1f1b", "replicas": (2, 2)}),
    ],
)
def test_ten_steps_of_accumulated_batches_equal_one_process(workers: Workers, name: str, options: object) -> None:
    """The second batch has a different number of rows than the compiled one."""
    for result in workers.run(trained, name, lengths_of(name), 10, (4, 6), {"micro_batches": 2, **options}):
        assert all(abs(mine - wanted) <= 1e-6 * abs(wanted) for mine, wanted in result["losses"])
        assert result["weights"] <= 1e-6, result["worst"]  # AdamW divides by near-zero gradients
        mine, wanted = result["evaluated"]
        assert abs(mine - wanted) <= 1e-6 * abs(wanted)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_half_precision_in_slices_trains_as_on_whole_sequences(pair: Workers, name: str, precision: str) -> None:
    for slices, whole in pair.run(half_precision, name, OF_16, precision, 12):
        assert slices[0] == pytest.approx(whole[0], rel=1e-3)
        assert slices == pytest.approx(whole, rel=5e-2) and slices[-1] < 0.9 * slices[0]


def test_sequences_of_another_length_are_refused_and_the_next_step_is_exact(pair: Workers) -> None:
    results = pair.run(shorter_sequences, "llama", OF_16, 12)
    for message, kind, _ in results:
        assert kind == "UsageError" and "slices of 7, 5, 3, 1 tokens do not make up a sequence of 12" in message
    assert results[0][2].within(), results[0][2]


WHY = {
    "bert": "scaled_dot_product_attention", "t5": "scaled_dot_product_attention", "vit": "no sequences",
    "router_loss": "slice by slice", "pooled": "mean", "norm_of_tokens": "statistics over all tokens",
    "flipped": "flip", "one_cell": "not proven to hide", "prefix_mask": "not proven to hide",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_sliced_are_refused_with_the_reason_and_train_whole(pair: Workers, name: str) -> None:
    results = pair.run(trained_whole, name, "float32" if name == "router_loss" else "float64")
    for result in results:
        assert WHY[name] in result["message"] and "leave token_slices out" in result["message"]
        assert result["slices"] == () and any("sequences are whole" in note for note in result["notes"])
    off = results[0]["off"]
    assert off.gradient <= (SINGLE if name == "router_loss" else EXACT) and abs(off.loss) <= 1e-6, off


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_1f1b_over_slices_keeps_little_more_than_one_sequence(pair: Workers, slices: int) -> None:
    """The first stage keeps (slices + stages - 1) / slices sequences, where whole sequences would be `stages`.

    In addition it keeps K and V of one sequence, because those of the next sequence are allocated with its first slice.
    Attention reads two heads of each.
    """
    lengths = (128 // slices,) * slices
    found = pair.run(kept, "llama_long", lengths, 4)[0]
    assert found["whole"] == pytest.approx(2 * found["one"], rel=0.02)
    assert found["slices"] <= (slices + 1) / slices * found["one"] + 2 * found["keys_and_values"], found
