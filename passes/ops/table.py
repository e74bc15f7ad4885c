"""Facts about single ops, as data: what family an op is of, and what its derivative needs.

Names are the op's own, without namespace and overload: "aten.add.Tensor" is "add".  An op that no table names is
treated as pointwise where costs are concerned, and as unknown where exactness is (`loss`).
"""

from __future__ import annotations

from functools import lru_cache

VIEW = "view"
POINTWISE = "pointwise"
REDUCTION = "reduction"
NORM = "norm"
MATMUL = "matmul"
INDEXING = "indexing"
CREATION = "creation"
LOSS = "loss"
WINDOW = "window"
OTHER = "other"

_FAMILIES: dict[str, str] = {
    VIEW: """
        reshape view _unsafe_view unsqueeze squeeze transpose swapaxes t permute movedim mT numpy_T adjoint
        expand expand_as broadcast_to broadcast_tensors slice select split split_with_sizes chunk unbind narrow
        detach unflatten flatten alias view_as unfold diagonal as_strided""",
    POINTWISE: """
        add sub rsub mul div neg positive abs absolute exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal
        square pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid
        relu relu6 leaky_relu elu celu selu gelu silu mish softplus log_sigmoid log_sigmoid_forward hardtanh
        hardsigmoid hardswish hardshrink softshrink tanhshrink threshold rrelu_with_noise prelu clamp clamp_min
        clamp_max clip minimum maximum min max fmin fmax where masked_fill lerp addcmul addcdiv floor ceil round
        trunc frac fmod remainder floor_divide true_divide sign sgn signbit heaviside hypot copysign logaddexp
        logaddexp2 xlogy logit nan_to_num lgamma digamma eq ne lt le gt ge equal_nan isnan isinf isfinite
        isposinf isneginf logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not
        bitwise_xor bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ clone
        contiguous _to_copy to type_as copy fill dropout native_dropout alpha_dropout feature_dropout
        feature_alpha_dropout bernoulli normal rad2deg deg2rad sinc i0""",
    REDUCTION: """
        sum mean nansum nanmean prod amax amin aminmax argmax argmin all any var std var_mean std_mean logsumexp
        linalg_vector_norm norm count_nonzero median nanmedian mode kthvalue max_dim min_dim cumsum cumprod
        cummax cummin logcumsumexp softmax _softmax _safe_softmax log_softmax _log_softmax glu cosine_similarity
        pairwise_distance""",
    NORM: """
        layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm instance_norm
        batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training cudnn_batch_norm _batch_norm_with_update_functional""",
    MATMUL: """
        linear addmm mm bmm baddbmm matmul mv addmv dot vdot inner outer ger einsum bilinear conv1d conv2d
        conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention
        _grouped_mm grouped_mm_fallback lstm gru rnn_tanh rnn_relu""",
    INDEXING: """
        embedding embedding_bag gather take_along_dim index index_select index_put _unsafe_index scatter
        scatter_add scatter_reduce select_scatter slice_scatter masked_select take sort argsort topk roll flip
        cat stack pad constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        repeat tile repeat_interleave one_hot tril triu histc bincount pixel_shuffle pixel_unshuffle
        channel_shuffle""",
    CREATION: """
        arange zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like
        empty_like scalar_tensor linspace eye tril_indices triu_indices rand randn rand_like randn_like randint
        randint_like randperm""",
    LOSS: """
        cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward mse_loss l1_loss
        smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
        poisson_nll_loss hinge_embedding_loss cosine_embedding_loss margin_ranking_loss triplet_margin_loss
        multi_margin_loss multilabel_margin_loss ctc_loss""",
    WINDOW: """
        max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices max_pool1d_with_indices
        avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_bicubic2d upsample_trilinear3d im2col col2im grid_sampler
        grid_sampler_2d affine_grid_generator local_response_norm""",
}
NAMES: dict[str, frozenset[str]] = {family: frozenset(names.split()) for family, names in _FAMILIES.items()}
"""Family -> the names of its ops."""
FAMILY: dict[str, str] = {name: family for family, names in NAMES.items() for name in names}
"""Op name -> family."""

_SAVES: dict[str, str] = {
    "nothing": """
        add sub rsub neg positive clone contiguous _to_copy to type_as copy fill sum mean nansum cat stack pad
        constant_pad_nd repeat tile repeat_interleave roll flip tril triu cumsum logcumsumexp
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_bicubic2d select_scatter slice_scatter pixel_shuffle pixel_unshuffle im2col col2im floor ceil
        round trunc sign bernoulli normal""",
    "output": """
        exp exp2 expm1 tanh sigmoid sqrt rsqrt reciprocal relu relu6 elu celu selu softmax _softmax
        _safe_softmax log_softmax _log_softmax""",
    "others": "mul matmul mm bmm mv dot outer inner",
    "indices": """
        embedding gather take_along_dim index index_select index_put _unsafe_index scatter scatter_add sort topk
        where masked_fill amax amin max_dim min_dim cross_entropy_loss nll_loss nll_loss_nd""",
    "both": """
        scaled_dot_product_attention logsumexp linalg_vector_norm norm prod var std max_pool2d_with_indices
        native_layer_norm cumprod cosine_similarity""",
}
SAVES: dict[str, str] = {name: what for what, names in _SAVES.items() for name in names.split()}
"""Op name -> what its derivative needs.  "nothing"; "output"; "others": each factor that another factor's gradient is
multiplied by; "indices": operands and results that are not floating point; "both": inputs and outputs.  Any other op
needs its inputs."""


@lru_cache(maxsize=4096)
def op_name(target: str) -> str:
    """The op's own name: "aten.add.Tensor" -> "add".

    transformers' own ops are known by name, as ATen's are; those of other libraries keep theirs: "mylib.f.default" ->
    "mylib.f".
    """
    parts = target.split(".")
    if parts[0] in ("aten", "transformers") and len(parts) > 1:
        return parts[1]
    return ".".join(parts[:-1]) if len(parts) > 2 else target


@lru_cache(maxsize=4096)
def family(target: str) -> str:
    """The family of an op, OTHER when no table names it.  `max` and `min` along an axis are reductions."""
    name = op_name(target)
    if name in ("max", "min") and not target.endswith(".other"):
        return REDUCTION
    return FAMILY.get(name, OTHER)
