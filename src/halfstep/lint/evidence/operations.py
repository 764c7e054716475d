"""What autocast does to the operations that the rules meet, by the names that people call them by.

The names are written down here, because a linter must not pay for `import torch`; a test compares them with the installed one.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ACTIVATIONS",
    "CPU_FP32_OPERATIONS",
    "CUDA_FP32_COMPOSITES",
    "CUDA_FP32_MODULES",
    "CUDA_FP32_OPERATIONS",
    "CUDA_FP32_OPERATIONS_AND_COMPOSITES",
    "FACTORIES",
    "INTEGER_RESULTS",
    "LIKE_FACTORIES",
    "LOWERED_MODULES",
    "LOWERED_OPERATIONS",
    "POINTWISE_BINARY",
    "PRESERVING",
    "WIDE_MODULES",
]

# What autocast runs in the dtype of the region, on every device. einsum ends in bmm where it is not lowered itself.
LOWERED_OPERATIONS: Final = frozenset(
    [
        "addbmm",
        "addmm",
        "baddbmm",
        "bmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "linear",
        "matmul",
        "mm",
        "prelu",
        "scaled_dot_product_attention",
        "einsum",
    ]
)

# What CUDA autocast runs in fp32, among the operations that take one tensor and give one back.
CUDA_FP32_OPERATIONS: Final = frozenset(
    [
        "acos",
        "asin",
        "cosh",
        "cosine_embedding_loss",
        "cosine_similarity",
        "cumprod",
        "cumsum",
        "erfinv",
        "exp",
        "expm1",
        "group_norm",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_softmax",
        "logsumexp",
        "margin_ranking_loss",
        "mse_loss",
        "nll_loss",
        "norm",
        "pow",
        "prod",
        "reciprocal",
        "rms_norm",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softmax",
        "softplus",
        "sum",
        "tan",
        "triplet_margin_loss",
        "cdist",
        "binary_cross_entropy_with_logits",
    ]
)

# What decomposes into operations of the list above, and so comes out in fp32 under CUDA autocast, too.
CUDA_FP32_COMPOSITES: Final = frozenset(
    ["square", "cross_entropy", "normalize", "linalg_norm", "vector_norm", "softmin", "pairwise_distance", "dist"]
)
CUDA_FP32_OPERATIONS_AND_COMPOSITES: Final = CUDA_FP32_OPERATIONS | CUDA_FP32_COMPOSITES

# What CPU autocast runs in fp32: hardly anything that has no loss in its name.
CPU_FP32_OPERATIONS: Final = frozenset(
    [
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cdist",
        "cosine_embedding_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "margin_ranking_loss",
        "mse_loss",
        "nll_loss",
        "prod",
        "quantile",
        "smooth_l1_loss",
        "soft_margin_loss",
        "trace",
        "triplet_margin_loss",
        "cross_entropy",
    ]
)

# Operations whose result has the dtype of what they are given.
PRESERVING: Final = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "squeeze",
        "unsqueeze",
        "flatten",
        "unflatten",
        "chunk",
        "split",
        "unbind",
        "tensor_split",
        "expand",
        "expand_as",
        "repeat",
        "repeat_interleave",
        "narrow",
        "select",
        "index_select",
        "gather",
        "take_along_dim",
        "movedim",
        "swapaxes",
        "swapdims",
        "t",
        "flip",
        "roll",
        "diagonal",
        "diag",
        "tril",
        "triu",
        "clone",
        "detach",
        "requires_grad_",
        "pin_memory",
        "cuda",
        "cpu",
        "relu",
        "relu_",
        "relu6",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "gelu",
        "silu",
        "mish",
        "hardswish",
        "hardsigmoid",
        "sigmoid",
        "tanh",
        "logsigmoid",
        "dropout",
        "dropout_",
        "alpha_dropout",
        "abs",
        "neg",
        "sign",
        "clamp",
        "clamp_",
        "clamp_min",
        "clamp_max",
        "clamp_min_",
        "clamp_max_",
        "clip",
        "max",
        "min",
        "amax",
        "amin",
        "mean",
        "var",
        "std",
        "median",
        "sqrt",
        "sqrt_",
        "masked_fill",
        "masked_fill_",
        "pad",
        "fold",
        "unfold",
        "avg_pool1d",
        "avg_pool2d",
        "max_pool1d",
        "max_pool2d",
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "interpolate",
        "batch_norm",
        "instance_norm",
        "sort",
        "topk",
        "mul_",
        "add_",
        "sub_",
        "div_",
        "fill_",
        "square_",
        "exp_",
        "masked_select",
        "rearrange",
        "sin",
        "cos",
        "atan",
        "floor",
        "round",
        "erf",
        "exp2",
        "nan_to_num",
        "zero_",
        "view_as",
        "reshape_as",
        "to_dense",
        "index_fill",
        "index_fill_",
        "scatter_",
        "scatter",
        "copy_",
        "as_strided",
        "data",
        "softmax2d",
    ]
)

# Operations on tensors whose result has the widest dtype among them.
POINTWISE_BINARY: Final = frozenset(
    ["add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "maximum", "minimum", "fmod", "remainder"]
)

# What gives numbers, indices or truth values, which leave the dtype of a tensor that they meet as it is.
INTEGER_RESULTS: Final = frozenset(
    [
        "argmax",
        "argmin",
        "argsort",
        "size",
        "dim",
        "numel",
        "item",
        "tolist",
        "stride",
        "isnan",
        "isinf",
        "isfinite",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "any",
        "all",
        "bool",
        "int",
        "long",
        "logical_not",
        "logical_and",
        "logical_or",
        "ndimension",
        "nonzero",
        "bincount",
    ]
)

FACTORIES: Final = frozenset(["zeros", "ones", "empty", "full", "tensor", "as_tensor", "rand", "randn", "eye", "linspace", "normal"])
LIKE_FACTORIES: Final = frozenset(
    [
        "zeros_like",
        "ones_like",
        "empty_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "new_tensor",
    ]
)

# Classes of torch.nn, by what their call does.
LOWERED_MODULES: Final = frozenset(
    ["Linear", "LazyLinear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "PReLU"]
)
CUDA_FP32_MODULES: Final = frozenset(
    ["LayerNorm", "GroupNorm", "RMSNorm", "Softmax", "LogSoftmax", "Softmin", "Softplus", "CosineSimilarity", "PairwiseDistance"]
)
WIDE_MODULES: Final = frozenset(["Embedding", "EmbeddingBag"])
ACTIVATIONS: Final = frozenset(
    [
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "ELU",
        "SELU",
        "CELU",
        "GELU",
        "SiLU",
        "Mish",
        "Hardswish",
        "Hardsigmoid",
        "Sigmoid",
        "Tanh",
        "LogSigmoid",
        "Dropout",
        "Dropout1d",
        "Dropout2d",
        "Dropout3d",
        "AlphaDropout",
        "Identity",
        "Flatten",
        "Unflatten",
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "InstanceNorm1d",
        "InstanceNorm2d",
        "MaxPool1d",
        "MaxPool2d",
        "AvgPool1d",
        "AvgPool2d",
        "AdaptiveAvgPool1d",
        "AdaptiveAvgPool2d",
        "AdaptiveMaxPool2d",
        "Upsample",
        "PixelShuffle",
    ]
)
