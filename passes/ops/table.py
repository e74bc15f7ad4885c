"""The table of ops: one row for each, with its axes as letters, what it saves, and what it computes (`row.OpRow`).

Costs, saved values, the loss analysis, random ops and views all depend on it.  An op without a row has the costs of a
pointwise op, and is unknown to the analyses.  `register` adds a row for an op of your own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from autopart.ir.errors import UsageError
from autopart.passes.ops.row import MATMUL, OTHER, POINTWISE, OpRow, check


def _rows(names: str, axes: str = "", **columns: Any) -> Iterator[OpRow]:
    """One row for each of several ops."""
    for name in names.split():
        yield OpRow(name, axes=axes, **columns)


def _views() -> Iterator[OpRow]:
    view = partial(_rows, family="view", storage="out of order", saves="nothing", flops="none")
    yield from view("reshape view unflatten flatten", storage="reshape", same_elements=True)
    yield from view("_unsafe_view view_as", storage="reshape")
    yield from view("unsqueeze squeeze", storage="in order", same_elements=True)
    yield from view("detach", "... -> ...", linear="each", storage="in order", same_elements=True)
    yield from view("alias", "... -> ...", linear="each", same_elements=True)
    yield from view("transpose t permute mT", "... -> ~...", linear="each", same_elements=True)
    yield from view("swapaxes movedim numpy_T", "... -> ~...", linear="each")
    yield from view("expand expand_as", "..., * -> ...", linear="each", same_elements=True)
    yield from view("broadcast_to", "... -> ...", linear="each")
    yield from view("slice narrow split split_with_sizes chunk", "...D -> ...D", linear="each", named_by="dim=0")
    yield from view("select unbind", "...D -> ...", mixes="D", linear="each", named_by="dim=0")
    yield from view("broadcast_tensors adjoint unfold diagonal as_strided")


def _pointwise() -> Iterator[OpRow]:
    pointwise = partial(_rows, axes="... -> ...", family="pointwise")
    yield from pointwise("add sub rsub", linear="sum", saves="nothing")
    yield from pointwise("mul", linear="product", saves="factors")
    yield from pointwise("div", saves="quotient")
    yield from pointwise("true_divide")
    yield from pointwise("neg positive", linear="each", saves="nothing")
    yield from pointwise("clone contiguous _to_copy to type_as", linear="each", saves="nothing", same_elements=True)
    yield from pointwise("copy fill floor ceil round trunc sign bernoulli normal", saves="nothing")
    yield from pointwise(
        "exp exp2 expm1 tanh sigmoid sqrt rsqrt reciprocal relu relu6 elu celu selu",
        saves="output",
    )
    yield from pointwise("where masked_fill", saves="indices")
    train, always = (("train", False),), ("train", "p")
    yield from pointwise("native_dropout dropout", saves="mask", hidden="mask", off=train, draws_unless_zero=always)
    yield from pointwise("feature_dropout alpha_dropout", off=train)
    yield from pointwise("rrelu_with_noise", off=(("training", False),), draws_unless_zero=("training",))
    yield from pointwise("""
        abs absolute log log2 log10 log1p square pow sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh
        erf erfc erfinv leaky_relu gelu silu mish softplus log_sigmoid log_sigmoid_forward hardtanh hardsigmoid
        hardswish hardshrink softshrink tanhshrink threshold prelu clamp clamp_min clamp_max clip minimum maximum
        min max fmin fmax lerp addcmul addcdiv frac fmod remainder floor_divide sgn signbit heaviside hypot copysign
        logaddexp logaddexp2 xlogy logit nan_to_num lgamma digamma eq ne lt le gt ge equal_nan isnan isinf isfinite
        isposinf isneginf logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not
        bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__
        feature_alpha_dropout rad2deg deg2rad sinc i0""")


def _reductions() -> Iterator[OpRow]:
    """Ops that drop the axes D, and ops that run along them."""

    reduction = partial(_rows, family="reduction", mixes="D", flops="read")
    over = partial(reduction, axes="...D -> ...", named_by="dim=all")
    along = partial(reduction, axes="...D -> ...D", named_by="dim=-1")
    pair = partial(reduction, axes="...D, ...D -> ...")
    yield from over("sum", mixes="", linear="each", saves="nothing")
    yield from over("mean", mixes="", linear="mean", saves="nothing")
    yield from over("nansum", saves="nothing")
    yield from over("amax amin", saves="indices")
    yield from over("prod var std logsumexp linalg_vector_norm norm", saves="both")
    yield from over("""
        nanmean aminmax argmax argmin all any var_mean std_mean count_nonzero median nanmedian max.dim min.dim
        max.default min.default""")
    yield from over("mode kthvalue", named_by="dim=-1")
    yield from _rows("linalg_det", "...mn -> ...", family="reduction", mixes="mn", saves="both")
    yield from _rows("linalg_slogdet", "...mn -> ..., ...", family="reduction", mixes="mn", saves="both")
    yield from pair("cosine_similarity", named_by="dim=1", saves="both")
    yield from pair("pairwise_distance", named_by="dim=-1")
    yield from along("softmax _softmax _safe_softmax log_softmax _log_softmax", saves="output")
    yield from along("diff", axes="...D, ...D, ...D -> ...D", saves="nothing")
    yield from along("cumsum", mixes="", may_mix="D", saves="nothing")
    yield from along("logcumsumexp", saves="nothing")
    yield from along("cumprod", saves="both")
    yield from along("cummax cummin glu")


def _norms() -> Iterator[OpRow]:
    norm = partial(_rows, family="norm", flops="read", hidden="statistics")
    trailing = partial(norm, axes="...D, D, D -> ...D", may_mix="D", named_by="normalized_shape")
    yield from trailing("layer_norm rms_norm _fused_rms_norm")
    yield from trailing("native_layer_norm", saves="both")
    yield from norm("group_norm native_group_norm", "nc..., c, c -> nc..., ng, ng", may_mix="c.")
    per_sample = partial(norm, hidden="channels", axes="nc..., c, c, c, c -> nc..., c, c, c, c", may_mix="c.")
    yield from per_sample("batch_norm _native_batch_norm_legit_functional", off=(("training", False),))
    yield from per_sample("""
        instance_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
        _batch_norm_with_update_functional""")


def _products() -> Iterator[OpRow]:
    def product(name: str, axes: str, flops: str) -> Iterator[OpRow]:
        return _rows(name, axes, family="matmul", linear="product", saves="factors", flops=flops)

    yield from product("linear", "...k, nk, +n -> ...n | ...k, k, + -> ...", "...kn")
    yield from product("matmul", "k, k -> | k, ...kn -> ...n | ...mk, k -> ...m | ...mk, ...kn -> ...mn", "...mnk")
    yield from product("mm", "mk, kn -> mn", "mnk")
    yield from product("addmm", "+mn, mk, kn -> mn", "mnk")
    yield from product("bmm", "bmk, bkn -> bmn", "bmnk")
    yield from product("baddbmm", "+bmn, bmk, bkn -> bmn", "bmnk")
    yield from product("mv", "mk, k -> m", "mk")
    yield from product("addmv", "+m, mk, k -> m", "mk")
    yield from product("dot vdot", "k, k ->", "k")
    yield from product("inner", "...k, nk -> ...n | ...k, k -> ...", "...kn")
    yield from product("outer ger", "m, n -> mn", "written")
    yield from product("bilinear", "...i, ...j, nij, +n -> ...n", "...nij")
    yield from product("einsum", "equation", "equation")
    yield from _rows("_grouped_mm grouped_mm_fallback", family="matmul", saves="factors", flops="inner")
    yield from _rows(
        "scaled_dot_product_attention",
        "enable_gqa: ...hqe, ...gke, ...gkv, +...hqk -> ...hqv | ...qe, ...ke, ...kv, +...qk -> ...qv",
        family="matmul",
        may_mix="hgqkev",
        saves="both",
        hidden="attention",
        flops="...hqke + ...hqkv",
        draws_unless_zero=("dropout_p",),
        off=(("dropout_p", 0.0),),
    )
    recurrent = partial(
        _rows,
        axes="batch_first: bti, lbh, * -> bto, lbh | tbi, lbh, * -> tbo, lbh",
        family="matmul",
        may_mix="tiolh",
        saves="factors",
        flops="weights",
        off=(("dropout", 0.0),),
        draws_unless_zero=("dropout", "train"),
    )
    of_lstm = "batch_first: bti, lbh, lbh, * -> bto, lbh, lbh | tbi, lbh, lbh, * -> tbo, lbh, lbh"
    yield from recurrent("lstm", axes=of_lstm, saves="both", hidden="lstm")
    yield from recurrent("gru", hidden="gru")
    yield from recurrent("rnn_tanh rnn_relu", hidden="rnn")
    yield from _convolutions()


def _convolutions() -> Iterator[OpRow]:
    """S, T, U: the axes of the image that the kernel visits; of a transposed convolution the operand's."""
    plain, transposed = [], []
    for axes, visited, kernel in (("x", "S", "u"), ("xy", "ST", "uv"), ("xyz", "STU", "uvw")):
        plain.append(f"ni{axes}, oi{kernel}, o -> no{visited} | i{axes}, oi{kernel}, o -> o{visited}")
        transposed.append(f"ni{visited}, io{kernel}, o -> no{axes} | i{visited}, io{kernel}, o -> o{axes}")
    convolution = partial(_rows, family="matmul", may_mix="ioxyzSTUuvw", saves="factors", flops="noiSTUuvw")
    for rank in (1, 2, 3):
        yield from convolution(f"conv{rank}d", plain[rank - 1])
        yield from convolution(f"conv_transpose{rank}d", transposed[rank - 1])
    either = [f"transposed: {form}" for forms in transposed for form in forms.split(" | ")] + plain
    yield from convolution("convolution", " | ".join(either))


def _indexing() -> Iterator[OpRow]:
    moved = partial(_rows, family="indexing")
    move, look_up = partial(moved, saves="nothing"), partial(moved, saves="indices")
    yield from look_up("embedding", "vd, ... -> ...d", may_mix="v", looks_up=True)
    yield from move("bucketize.Tensor", "..., b -> ...", mixes="b")
    yield from look_up("gather", "...D, ...D -> ...D", may_mix="D", named_by="dim=0", looks_up=True)
    yield from look_up("scatter scatter_add", "...D, ...D, ...D -> ...D", may_mix="D", named_by="dim=0")
    yield from look_up("index_select index", looks_up=True)
    yield from look_up("take_along_dim index_put _unsafe_index")
    ordered = partial(moved, axes="...D -> ...D", may_mix="D", named_by="dim=-1")
    yield from ordered("sort topk", saves="indices")
    yield from ordered("argsort")
    yield from ordered("flip", named_by="dims", saves="nothing")
    yield from ordered("roll", named_by="dims=all", saves="nothing")
    yield from move("tril triu", "...mn -> ...mn", may_mix="mn")
    yield from move("pixel_shuffle pixel_unshuffle", "...cxy -> ...cxy", may_mix="cxy")
    yield from move("slice_scatter", "...D, ...D -> ...D", may_mix="D", named_by="dim=0")
    yield from move("select_scatter", "...D, ... -> ...D", may_mix="D", named_by="dim=0")
    padded = partial(moved, axes="...D -> ...D", mixes="D")
    yield from padded("pad constant_pad_nd", named_by="pad", saves="nothing")
    yield from padded("reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d", named_by="padding")
    yield from move("cat stack repeat tile repeat_interleave")
    yield from moved("one_hot", "... -> ...h")
    yield from moved("channel_shuffle", "nc... -> nc...", may_mix="c.")
    yield from moved("embedding_bag scatter_reduce masked_select take histc bincount")


def _creations() -> Iterator[OpRow]:
    create = partial(_rows, family="creation", saves="nothing", flops="none")
    yield from create("rand randn rand_like randn_like normal_functional", stand_in=0.5)
    yield from create("exponential geometric cauchy log_normal uniform", stand_in=0.5)
    yield from create("""
        arange zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like
        scalar_tensor linspace eye tril_indices triu_indices randint randint_like randperm""")


def _losses() -> Iterator[OpRow]:
    """With `reduction`, results have fewer axes than without."""

    loss = partial(_rows, family="loss", flops="read")
    yield from loss("cross_entropy_loss", saves="indices", hidden="log_softmax", averages="classes")
    yield from loss("nll_loss nll_loss_nd", saves="indices", averages="classes")
    yield from loss("nll_loss2d", averages="classes")
    yield from loss(
        """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
        soft_margin_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss""",
        "... -> ...",
        averages="elements",
    )
    vectors = "n..., n..., n... -> n | n..., n..., n... ->"
    names = "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss"
    yield from loss(names, vectors, may_mix=".", averages="elements")
    yield from loss("nll_loss_forward nll_loss2d_forward ctc_loss")
    yield from loss("autopart.ctc_losses", "tnc, ns, n, n -> n", may_mix="tcs")


def _windows() -> Iterator[OpRow]:
    def window(names: str, axes: str, saves: str = "inputs", hidden: str = "") -> Iterator[OpRow]:
        mixed = "".join(sorted({letter for letter in axes if letter.isalpha()} - {"n"}))
        return _rows(names, axes, family="window", may_mix=mixed, saves=saves, hidden=hidden)

    line, plane, box = "...x -> ...x", "...xy -> ...xy", "...xyz -> ...xyz"
    yield from window("adaptive_avg_pool1d upsample_nearest1d upsample_linear1d", line, "nothing")
    yield from window("avg_pool1d max_pool1d max_pool1d_with_indices adaptive_max_pool1d", line)
    yield from window("adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d", plane, "nothing")
    yield from window("upsample_bicubic2d _upsample_nearest_exact2d", plane, "nothing")
    yield from window("max_pool2d_with_indices", plane, "both")
    yield from window("avg_pool2d adaptive_max_pool2d _adaptive_avg_pool2d", plane)
    yield from window("max_pool2d", plane, hidden="indices")
    yield from window("_upsample_bilinear2d_aa", plane)
    yield from window("adaptive_avg_pool3d upsample_nearest3d", box, "nothing")
    yield from window("avg_pool3d max_pool3d max_pool3d_with_indices adaptive_max_pool3d upsample_trilinear3d", box)
    yield from window("im2col", "ncxy -> nij", "nothing")
    yield from window("col2im", "nij -> ncxy", "nothing")
    yield from window("grid_sampler grid_sampler_2d", "ncxy, nuvi -> ncuv | ncxyz, nuvwi -> ncuvw")
    yield from window("affine_grid_generator", "nij -> nuvk | nij -> nuvwk")
    yield from _rows("local_response_norm", "nc... -> nc...", family="window", may_mix="c.")


def _table() -> dict[str, OpRow]:
    table: dict[str, OpRow] = {}
    assertions = "_assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range"
    families = (_views, _pointwise, _reductions, _norms, _products, _indexing, _creations, _losses, _windows)
    rows = chain.from_iterable(family() for family in families)
    for row in (*rows, *_rows(assertions, family="assertion", saves="nothing", flops="none")):
        assert row.name not in table, f"{row.name} has two rows"
        table[row.name] = row
    return table


_ROWS = _table()
_REGISTERED: dict[str, OpRow] = {}


def register(row: OpRow) -> OpRow:
    """Add a row for an op of your own, for the rest of this process, and return it.

    Register the same rows in every process that plans.  Raises UsageError for a row that is not valid, or for an op
    that has another row already.
    """
    known = _ROWS.get(check(row).name, row)
    if known != row:
        raise UsageError(
            f"op {row.name!r} has another row already",
            why="earlier plans were made with that row",
            fix="give every op one row, and do not register rows for ATen's ops",
        )
    _ROWS[row.name] = _REGISTERED[row.name] = row
    row_of.cache_clear()
    keeps.cache_clear()
    return row


def registered() -> tuple[OpRow, ...]:
    """The registered rows, by name."""
    return tuple(_REGISTERED[name] for name in sorted(_REGISTERED))


@lru_cache(maxsize=4096)
def op_name(target: str) -> str:
    """The op's own name: "aten.add.Tensor" -> "add".

    Ops of transformers are known by name alone, like those of ATen; other libraries keep their prefix:
    "mylib.f.default" -> "mylib.f".
    """
    parts = target.split(".")
    if parts[0] in ("aten", "transformers") and len(parts) > 1:
        return parts[1]
    return ".".join(parts[:-1]) if len(parts) > 2 else target


@lru_cache(maxsize=4096)
def row_of(target: str) -> OpRow:
    """The row of an op, by name and overload ("max.dim") or by name; an unknown op gets one without letters."""
    name, overload = op_name(target), target.rpartition(".")[2]
    return _ROWS.get(f"{name}.{overload}") or _ROWS.get(name) or OpRow(name, OTHER)


def has_row(target: str) -> bool:
    """Whether the table knows anything about an op."""
    return row_of(target) != OpRow(op_name(target), OTHER)


@lru_cache(maxsize=4096)
def keeps(target: str) -> str:
    """When an op gives autograd the tensors that it saves: "" never, "before" it runs, or "after", also if unknown."""
    row = row_of(target)
    if row.saves == "nothing" and not row.hidden:
        return ""
    operands = row.saves in ("inputs", "factors", "quotient") and not row.hidden
    return "before" if operands and row.family in (MATMUL, POINTWISE) else "after"
