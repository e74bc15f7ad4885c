"""Setups: a model and all that a plan and options may say about training it.  Drawn, made simpler, and printed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from autopart.ir.program import BUCKET_BYTES
from autopart.ir.shares import POLICIES, Policy
from autopart.passes.program.named import SEARCHED
from autopart.passes.program.orders import LOOP, V

DRAWN = ""
"""A schedule from outside, whose order is drawn."""


@dataclass(frozen=True)
class Setup:
    """How to train a model.

    model: a name of `any_plan.case_of`.  rows: of each batch; the optimizer steps after the first and after the last.
    counts: replicas of each worker, of `shards` ranks each, in a world of so many ranks, of which others idle.
    per_rank: stages of each worker.  schedule: DRAWN draws an order in which a backward is split with the probability
    `split`.  shares and policies: of each worker's replicas, () for equal shares and "split".  recompute: the part of
    each stage's ops.  whole: the probability that a stage runs whole backwards where the schedule splits them.  frozen:
    the first so many parameters do not learn.  by_options: the planner cuts, instead of the seed.  evaluated: a loss
    after training, too.
    """

    model: str = "stack"
    rows: tuple[int, ...] = (4, 4)
    world: int = 2
    counts: tuple[int, ...] = (1,)
    per_rank: int = 1
    placement: str = LOOP
    shards: int = 1
    schedule: str = "gpipe"
    split: float = 1.0
    micros: int = 1
    shares: tuple[tuple[int, ...], ...] = ()
    policies: tuple[Policy, ...] = ()
    zero: int = 0
    bucket_bytes: int = BUCKET_BYTES
    recompute: float = 0.0
    whole: float = 0.0
    slices: tuple[int, ...] = ()
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float64"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    masters: bool = False
    synced: bool = False
    frozen: int = 0
    backend: str = "eager"
    transport: str = "auto"
    optimizer: str = "momentum"
    by_options: bool = False
    evaluated: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        """Return the call that makes it, with what differs from the defaults."""
        told = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Setup({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in told)})"

    @property
    def used(self) -> int:
        """The number of ranks that do not idle."""
        return sum(self.counts) * self.shards

    @property
    def half(self) -> bool:
        """Whether something is computed in half precision."""
        return self.precision != "fp32" or self.masters

    def script(self) -> str:
        """Return a script that runs it beside one process; for a shell in the root of the project."""
        return (
            "PYTHONPATH=tests OMP_NUM_THREADS=1 python -c '\n"
            "from support.languages.setups import Setup\n"
            "from support.oracles.any_plan import by_hand\n"
            f"by_hand({str(self).replace(chr(39), chr(34))})'"
        )


# -- models --------------------------------------------------------------------------------------------------------

PLAIN = (
    "tied", "skips", "stack", "stack_sum", "frozen", "mixed_grads", "late_inputs", "unused_grad", "aliases", "nest",
    "shared_by_all", "checkpointed", "two_outputs", "rotary", "transposed", "root_parameters", "in_place", "basic",
    "shared_embedding", "layer_norm", "native_call", "function", "fork_join", "small_param", "shared_input",
    "shared_param", "embedding", "loss_out", "identity",
)  # fmt: skip
"""Small models.  "random N" is a module of random ops."""
COUPLED = ("batch_norm", "buffer1", "buffer2", "buffer3", "pictures")
"""With batch statistics."""
DRAWING = ("dropped", "decoder_dropout", "decoder_written")
"""With random numbers."""
CAUSAL = (
    "tril_softmax", "is_causal", "exp_of_scores", "convolved_and_shifted", "with_padding", "documents",
    "outer_products", "relative_bias", "complex_rotation", "mask_buffer", "decoder", "decoder_window",
    "decoder_merged", "decoder_written", "decoder_dropout",
)  # fmt: skip
"""Whose sequences can be cut."""
SMOOTH = ("tied", "stack", "rotary", "shared_by_all", "aliases", "decoder", "decoder_window", "skips")
"""Whose gradients do not jump where values are rounded to half precision."""
REAL = (
    "gpt2", "llama", "llama_tied", "mistral", "qwen3", "gemma2", "gpt_neox", "opt", "bert", "roberta", "t5", "vit",
    "convnext", "resnet", "mixtral", "phi", "falcon", "olmo2", "bloom", "gptj", "gpt_neo", "llama_packed",
    "mistral_packed", "llama_eager", "mistral_eager", "gpt2_eager", "qwen3_moe",
)  # fmt: skip
REAL_COUPLED, REAL_WHOLE = ("resnet",), ("bert", "roberta", "t5", "vit", "convnext", "resnet")
_CUT_BY_FOUR = (
    "basic", "shared_embedding", "small_param", "decoder_window", "decoder_written", "gpt2", "gemma2", "bert", "t5",
    "vit", *[f"random {n}" for n in (0, 1, 2, 3, 4, 5, 7, 9, 12, 14, 23, 27, 38, 39)],
)  # fmt: skip
WHOLE = (0.0, 0.5, 1.0)
SHARDED = {
    4: _CUT_BY_FOUR,
    2: (
        *_CUT_BY_FOUR, "tied", "stack", "stack_sum", "frozen", "late_inputs", "checkpointed", "transposed", "in_place",
        "embedding", "tril_softmax", "is_causal", "exp_of_scores", "with_padding", "documents", "relative_bias",
        "mask_buffer", "decoder", "decoder_merged", "dropped", "llama_tied", "mixtral",
    ),
}  # fmt: skip
"""Models of which so many ranks can divide something."""
SIMPLER = ("stack", "tied", "batch_norm", "dropped", "is_causal")
"""Models that a failure is tried with."""


def tokens_of(model: str) -> int:
    """Return the length of the sequences of a causal model."""
    return 16 if model in REAL or model.startswith("decoder") else 12


# -- drawing -------------------------------------------------------------------------------------------------------


def drawn(seed: int, world: int, *, model: str = "", compiled: float = 0.0, shards: int | None = None) -> Setup:
    """Return the setup of a seed.  model: else it is a small one that is drawn.  compiled: the probability of compiled
    stages.  shards: else they are drawn."""
    draw, apart = random.Random(seed), random.Random(f"shards of {seed}")
    if shards is None:
        shards = apart.choice([1, 1, 1, 1, *[n for n in (2, 2, 2, 4) if n <= world]])
    beside = shards > 1 and apart.random() < 0.9  # with what runs together, as far as that is known
    cut = draw.random() < 0.3 and model not in REAL_WHOLE and not beside
    model = model or (apart.choice(SHARDED[shards]) if beside else _model(draw, cut=cut))
    if beside:
        cut = model in (*CAUSAL, *REAL) and model not in REAL_WHOLE and apart.random() < 0.4
    coupled = model in COUPLED + REAL_COUPLED
    counts = _counts(draw, world // shards)
    micros = draw.randint(1, 5)
    setup = Setup(
        model=model, world=world, counts=counts, micros=micros, seed=seed, by_options=draw.random() < 0.35,
        shards=shards, zero=draw.choice((0, 1)), bucket_bytes=draw.choice((64, 5000, BUCKET_BYTES)),
        recompute=draw.choice((0.0, 0.0, 0.4, 1.0)), transport=draw.choice(("auto", "auto", "fake-nccl")),
        frozen=draw.choice((0, 0, 0, 1, 3)), optimizer=draw.choice(("momentum", "adam")),
        synced=coupled and (max(counts) > 1 or draw.random() < 0.3),
        backend="inductor" if draw.random() < compiled else "eager", evaluated=draw.random() < 0.15,
    )  # fmt: skip
    setup = _with_order(setup, draw, cut=cut)
    setup = _with_replicas(setup, draw)
    setup = _with_numbers(setup, draw)
    most = 1 if model == "pictures" else max(counts)
    least = 2 * micros * most + 1 if coupled else max(3, micros)  # most batch norms need two rows, where they are
    rows = tuple(draw.randint(least, least + 6) for _ in range(draw.choice((2, 2, 3))))
    if not coupled and draw.random() < 0.3:
        rows = (*rows[:-1], draw.randint(1, 3))  # fewer rows than replicas, or than micro-batches
    if beside:
        if cut and apart.random() < 0.5:  # else ranks seldom have equal parts of all slices
            setup = replace(setup, slices=(4, tokens_of(model) - 4))
        setup = replace(setup, policies=(), synced=False, backend="eager", frozen=0)
    whole = 0.0 if setup.by_options or setup.schedule == SEARCHED else random.Random(f"whole of {seed}").choice(WHOLE)
    return replace(setup, rows=rows, whole=whole)


def _model(draw: random.Random, *, cut: bool) -> str:
    if cut:
        return draw.choice(CAUSAL) if draw.random() < 0.95 else draw.choice(PLAIN)
    ops = f"random {draw.randrange(10**4)}"
    return draw.choice((*PLAIN * 2, *COUPLED * 3, *DRAWING * 2, "decoder", *[ops] * 15))


def _counts(draw: random.Random, world: int) -> tuple[int, ...]:
    """Return the replicas of each worker, of as many ranks as the world has, or sometimes fewer."""
    counts = [1] * draw.randint(1, world)
    while sum(counts) < world and draw.random() < 0.85:
        counts[draw.randrange(len(counts))] += 1
    if len(counts) > 1 and world % len(counts) == 0 and draw.random() < 0.4:
        counts = [world // len(counts)] * len(counts)
    return tuple(counts)


def _with_order(setup: Setup, draw: random.Random, *, cut: bool) -> Setup:
    per_rank = draw.choice((1, 1, 2, 4 if setup.by_options else 3)) if len({*setup.counts}) == 1 else 1
    placement = draw.choice((LOOP, V)) if per_rank == 2 and not cut else LOOP
    free = () if cut or setup.by_options else (DRAWN, DRAWN, SEARCHED)
    if per_rank == 1:
        schedules: Sequence[str] = ("1f1b", "1f1b-deep", "gpipe", "zb-h1", "zb-h2", *free)
    else:
        own = () if setup.by_options else ("gpipe", *free)
        schedules = ("interleaved", *own) if placement == LOOP else ("zb-v", *own)
    tokens = tokens_of(setup.model)
    first = draw.randint(3, tokens - 3)
    slices = draw.choice(((first, tokens - first), (4, 5, tokens - 9))) if cut else ()
    return replace(
        setup, per_rank=per_rank, placement=placement, schedule=draw.choice(schedules), slices=slices,
        split=draw.choice((0.3, 0.7, 1.0)),
    )  # fmt: skip


def _with_replicas(setup: Setup, draw: random.Random) -> Setup:
    """Draw how replicas divide the work.  Those that take turns have statistics of their own, so that buffers are not
    those of one process: `test_batch_statistics`."""
    own = setup.counts
    if max(own) == 1:
        return setup
    may_turn = setup.micros >= max(own) and setup.per_rank == 1 and setup.schedule != SEARCHED
    may_turn &= setup.shards == 1 or setup.by_options  # a plan by hand is not even valid
    coupled = setup.model in COUPLED + REAL_COUPLED
    may_turn &= not coupled or draw.random() < 0.2  # refused where a norm is on such a stage
    if setup.by_options:
        return replace(setup, policies=(draw.choice(POLICIES),) * len(own)) if may_turn else setup
    policies: tuple[Policy, ...] = tuple(draw.choice(POLICIES) if may_turn and n > 1 else "split" for n in own)
    shares = tuple(
        tuple(draw.randint(1, 5) for _ in range(n)) if n > 1 and policy == "split" and draw.random() < 0.5 else ()
        for n, policy in zip(own, policies, strict=True)
    )
    return replace(setup, policies=policies if "turn" in policies else (), shares=shares if any(shares) else ())


def _with_numbers(setup: Setup, draw: random.Random) -> Setup:
    """Draw precision and dtype."""
    kind = draw.random()
    if kind < 0.25 and setup.model not in COUPLED + DRAWING + REAL:
        model = draw.choice([name for name in SMOOTH if setup.shards == 1 or name in SHARDED[setup.shards]])
        if setup.slices:
            model = "decoder" if tokens_of(setup.model) == 16 else "is_causal"
        half = replace(setup, model=model, dtype="float32", frozen=0, optimizer="momentum")
        if kind < 0.1 and model != "rotary":  # its table is in fp32, which torch does not multiply with half weights
            return replace(half, masters=True, dtype=draw.choice(("bfloat16", "float16")))
        return replace(half, precision=draw.choice(("bf16", "fp16")))
    in_double = setup.model in REAL_WHOLE or setup.model not in (*REAL, "layer_norm")  # others have a loss in single
    return setup if in_double and setup.backend == "eager" else replace(setup, dtype="float32")


# -- making a failure small ------------------------------------------------------------------------------------------


def simpler(setup: Setup) -> Iterator[Setup]:
    """Yield setups that are simpler in one way: without one option, then smaller, then with another model."""
    plain: dict[str, Any] = {f.name: f.default for f in fields(Setup)}
    kept = ("model", "rows", "world", "counts", "micros", "dtype", "seed", "per_rank", "slices")
    for name in [name for name in plain if name not in kept]:
        yield replace(setup, **{name: plain[name]})
    yield replace(setup, slices=(), schedule="gpipe")
    yield replace(setup, per_rank=1, placement=LOOP, schedule="gpipe")
    if not setup.half:
        yield replace(setup, dtype="float64")
    flat = {"shares": (), "policies": ()}
    for count in range(1, len(setup.counts)):
        fewer = replace(setup, counts=setup.counts[:count], **flat)
        yield replace(fewer, world=max(2, fewer.used))
    yield replace(setup, counts=(1,) * len(setup.counts), **flat)
    if setup.world > max(2, setup.used):
        yield replace(setup, world=max(2, setup.used))
    for micros in range(1, setup.micros):
        yield replace(setup, micros=micros)
    yield replace(setup, rows=setup.rows[:2])
    yield replace(setup, rows=(setup.rows[0],) * len(setup.rows))
    if min(setup.rows) > 2 * setup.micros:
        yield replace(setup, rows=tuple(rows - 1 for rows in setup.rows))
    for name in SIMPLER[: SIMPLER.index(setup.model) if setup.model in SIMPLER else None]:
        if not setup.slices or tokens_of(name) == tokens_of(setup.model):
            yield replace(setup, model=name)
    if setup.seed:
        yield replace(setup, seed=0)


def smallest(setup: Setup, fails: Any) -> Setup:
    """Return a setup that fails still, of which no simpler one does.  Each is tried once; the same for each run."""
    tried = {setup}
    while True:
        for other in simpler(setup):
            if other not in tried:
                tried.add(other)
                if fails(other):
                    setup = other
                    break
        else:
            return setup
