"""The operations that a rehearsal passes through to the CPU's own half kernels, each with its reason.

None of them rounds: what they return consists of bits that they were given, of constants, or of random numbers. All other operations that
take half tensors compute in fp32 and round. Views pass through as well; their schemas tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["PASSED_THROUGH", "kind_of_pass", "passes_through"]

_GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "converts: to round is what it is for": "_to_copy copy_ copy _copy_from to_dense to_sparse _to_dense _to_sparse _to_cpu",
        "makes a tensor from no values": (
            "empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones "
            "full full_like new_full zero_ zero fill fill_ scalar_tensor eye arange linspace _efficientzerotensor resize_ resize_as_ set_ "
            "sparse_resize_ sparse_resize_and_clear_ _coalesced_"
        ),
        "moves values": (
            "clone lift_fresh lift_fresh_copy _unsafe_view _reshape_copy cat stack "
            "_chunk_cat unsafe_split unsafe_chunk unsafe_split_with_sizes split_copy split_with_sizes_copy unbind_copy view_copy "
            "expand_copy permute_copy transpose_copy t_copy slice_copy select_copy squeeze_copy unsqueeze_copy as_strided_copy detach_copy "
            "alias_copy narrow_copy unfold_copy diagonal_copy index_select index gather take take_along_dim repeat repeat_interleave tile "
            "flip roll rot90 tril tril_ triu triu_ constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
            "replication_pad2d replication_pad3d slice_scatter select_scatter diagonal_scatter as_strided_scatter index_copy index_copy_ "
            "index_fill index_fill_ masked_fill masked_fill_ masked_scatter masked_scatter_ masked_select embedding pixel_shuffle "
            "pixel_unshuffle channel_shuffle native_channel_shuffle im2col diag_embed select_backward slice_backward diagonal_backward "
            "nonzero nonzero_static _pin_memory _local_scalar_dense _foreach_copy _foreach_copy_ _foreach_zero _foreach_zero_ "
            "_foreach_clone sparse_mask _sparse_coo_tensor_with_dims_and_tensors _indices_copy _values_copy indices_copy values_copy"
        ),
        "chooses among values, or changes their sign": (
            "relu relu_ threshold_backward where maximum minimum fmax fmin max min amax amin aminmax argmax argmin argsort sort topk "
            "kthvalue median nanmedian mode cummax cummin _cummax_helper _cummin_helper max_pool2d_with_indices max_pool3d_with_indices "
            "adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d neg neg_ abs "
            "abs_ sign sign_ sgn sgn_ copysign copysign_ unique_consecutive unique_dim _unique _unique2"
        ),
        "answers yes or no": (
            "eq ne lt le gt ge equal isnan isinf isfinite isposinf isneginf signbit logical_and logical_or logical_not logical_xor any all "
            "is_same_size is_nonzero bucketize searchsorted isin"
        ),
        "rounds once, as if it computed in fp32": "native_dropout_backward",
        "draws random numbers": (
            "bernoulli bernoulli_ normal normal_ normal_functional uniform uniform_ exponential_ geometric_ cauchy_ log_normal_ random_ "
            "random rand rand_like randn randn_like randint randint_like randperm"
        ),
    }
)

# Names of operations of aten, without overload, and why each passes through.
PASSED_THROUGH: Final[Mapping[str, str]] = MappingProxyType({name: reason for reason, names in _GROUPS.items() for name in names.split()})


def kind_of_pass(name: str) -> str | None:
    """What an operation that passes through does, in a word: `converts`, `makes`, `moves`, `chooses`, `answers`, `rounds` or `draws`.

    Args:
        name: Without namespace and overload, such as `relu`.

    Returns:
        `None` for one that computes.

    Example:
        >>> kind_of_pass("clone"), kind_of_pass("relu"), kind_of_pass("gelu")
        ('moves', 'chooses', None)
    """
    reason = PASSED_THROUGH.get(name)
    return None if reason is None else reason.partition(" ")[0].rstrip(":,")


def passes_through(name: str) -> bool:
    """Whether a rehearsal leaves an operation to the CPU's own half kernel.

    Args:
        name: Without overload, such as `aten::relu`. Operations outside of aten, such as those of other packages, pass through: nobody
            but their authors knows what they compute.

    Example:
        >>> passes_through("aten::relu"), passes_through("aten::gelu"), passes_through("torchvision::nms")
        (True, False, True)
    """
    namespace, _, operation = name.partition("::")
    return namespace != "aten" or operation in PASSED_THROUGH
