"""Pieces of code whose casts are compared, on a GPU and in a rehearsal of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.cifar_resnet18 import ResNet18
from tests.numerics.models import UNet, VitBlock

__all__ = ["CASES", "Case", "Region"]

# Opens a region of autocast on the device at hand; takes the options of `torch.autocast`.
Region: TypeAlias = Callable[..., AbstractContextManager[Any]]

# What makes modules and tensors, and what runs with them.
Case: TypeAlias = tuple[Callable[[], tuple[Any, ...]], Callable[..., None]]


def inside(run: Callable[..., Any], *, math: bool = False) -> Callable[..., None]:
    """Runs in one region; attention by its plain formula where `math`, since its kernels differ from device to device."""

    def run_inside(region: Region, *inputs: Any) -> None:
        with region(), sdpa_kernel(SDPBackend.MATH) if math else nullcontext():
            run(*inputs)

    return run_inside


def weight(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def index(*values: int) -> Tensor:
    return torch.tensor(values)


def lowered(x: Tensor) -> Tensor:
    """The same shape in half precision, as it leaves a matrix product."""
    return F.linear(x, x.new_ones(x.shape[-1], x.shape[-1]))


def nested(region: Region, model: nn.Module, x: Tensor) -> None:
    with region():
        y = model(x)
        with region(enabled=False):
            model(y.float()).exp()
        with region():
            model(y)
    with region():
        model(x)


def without_cache(region: Region, model: nn.Module, x: Tensor) -> None:
    with region(cache_enabled=False):
        model(model(x))


def evaluated_first(region: Region, model: nn.Module, x: Tensor) -> None:
    with region():
        with torch.no_grad():
            model(x)
        model(x)


class Full(torch.autograd.Function):
    """Casts what it is given to fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.mm(x, x.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def custom_forward(region: Region, x: Tensor) -> None:
    class Cast(Full):
        forward = staticmethod(torch.amp.custom_fwd(Full.forward, device_type=x.device.type, cast_inputs=torch.float32))

    with region():
        Cast.apply(torch.mm(x, x))  # type: ignore[no-untyped-call]


def shared_weight(x: Tensor, shared: Tensor) -> None:
    F.linear(F.linear(x, shared), shared)
    torch.einsum("ij,jk->ik", x, shared)
    F.linear(x, shared.t())


def view_that_is_a_leaf(region: Region, x: Tensor) -> None:
    with torch.no_grad():
        view = x.view(4, 4)
    view.requires_grad_()
    with region():
        F.linear(view, view)
        F.linear(view, view)


def pow_and_scalars(x: Tensor) -> None:
    y = lowered(x)
    _ = (y**2, y**y, 2**y, y * 2, y / 3, 1 - y, y + x, y * x, y - y)


def promoting(x: Tensor) -> None:
    y, rows = lowered(x), torch.zeros(4, 4, dtype=torch.int64, device=x.device)
    for other in (x, y):
        torch.cat([y, other])
        torch.stack([y, other])
        torch.addcmul(y, y, other)
        torch.addcdiv(y, y, other)
        torch.atan2(y, other)
        torch.cross(y[:, :3], other[:, :3], dim=1)
        torch.dot(y[0], other[0])
        torch.tensordot(y, other, 2)
        torch.scatter_add(y, 0, rows, other)
        torch.index_put(y, (rows[0],), other)
        torch.where(x > 0, y, other)
        torch.maximum(y, other)
        F.bilinear(y, other, torch.ones(2, 4, 4, device=x.device))


def products(a: Tensor, b: Tensor) -> None:
    torch.mm(a, b)
    torch.mv(a, b[0])
    torch.addmm(a, a, b)
    torch.addmv(a[0], a, b[0])
    torch.matmul(a, b)
    torch.bmm(a[None], b[None])
    torch.baddbmm(a[None], a[None], b[None])
    torch.addbmm(a, a[None], b[None])
    torch.addr(a, a[0], b[0])
    torch.linalg.multi_dot([a, b, a])
    torch.kron(a, b)
    torch.vdot(a[0], b[0])
    torch.inner(a, b)
    torch.outer(a[0], b[0])
    torch.linalg.vecdot(a, b)
    torch.einsum("bi,bj->bij", a, b)


def reductions(x: Tensor) -> None:
    y = lowered(x)
    for name in ("sum", "mean", "prod", "var", "std", "amax", "norm", "nansum", "max", "all"):
        getattr(y, name)()
    for name in ("sum", "mean", "prod", "var", "std", "norm", "logsumexp", "cumsum", "cumprod", "softmax", "log_softmax", "logcumsumexp"):
        getattr(y, name)(0)
    F.softmin(y, 0)
    torch.linalg.vector_norm(y)
    torch.linalg.matrix_norm(y)
    torch.renorm(y, 2, 0, 1.0)
    torch.dist(y, y)
    torch.cdist(y, y)
    F.pdist(y)


def pointwise(x: Tensor) -> None:
    y = lowered(x)
    for name in (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan"),
        *("tanh", "sigmoid", "relu", "sin", "cos", "sqrt", "abs", "erf", "floor", "atan", "square", "sign", "sort", "neg"),
    ):
        getattr(torch, name)(y)


def activations(x: Tensor, slope: Tensor) -> None:
    y = lowered(x)
    F.prelu(y, slope)
    for name in ("gelu", "silu", "mish", "elu", "hardswish", "selu", "logsigmoid", "softplus", "glu", "normalize", "hardtanh", "celu"):
        getattr(F, name)(y)


def norms(x: Tensor, scale: Tensor) -> None:
    y = lowered(x)
    image = y.view(4, 4, 1, 1).expand(4, 4, 2, 2)
    F.layer_norm(y, (4,))
    F.layer_norm(y, (4,), scale, scale)
    F.rms_norm(y, (4,))
    F.rms_norm(y, (4,), scale)
    F.group_norm(image, 2, scale, scale)
    F.instance_norm(image)
    F.batch_norm(y, None, None, scale, scale, training=True)
    F.local_response_norm(image, 2)


def losses(x: Tensor, wanted: Tensor, classes: Tensor) -> None:
    y = lowered(x)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"):
        getattr(F, name)(y, wanted)
    for name in ("poisson_nll_loss", "hinge_embedding_loss", "multilabel_soft_margin_loss", "cosine_similarity", "pairwise_distance"):
        getattr(F, name)(y, wanted)
    F.kl_div(y, wanted, reduction="batchmean")
    F.cosine_embedding_loss(y, wanted, classes.sign())
    F.margin_ranking_loss(y, wanted, wanted.sign())
    F.triplet_margin_loss(y, wanted, y * 2)
    F.cross_entropy(y, classes, label_smoothing=0.1)
    F.cross_entropy(y, classes)
    F.nll_loss(y.log_softmax(-1), classes)
    F.nll_loss(y.view(4, 4, 1, 1).expand(4, 4, 2, 2), classes.view(4, 1, 1).expand(4, 2, 2))
    F.multi_margin_loss(y, classes)


def images(x: Tensor, kernel: Tensor) -> None:
    y = F.conv2d(x, kernel)
    grid = y.permute(0, 2, 3, 1)[..., :2]
    F.grid_sample(y, grid, align_corners=False)
    F.grid_sample(x, grid, align_corners=False)
    F.grid_sample(y, grid.float(), align_corners=False)
    for mode in ("bilinear", "nearest", "bicubic", "area"):
        F.interpolate(y, scale_factor=2, mode=mode)
    F.pixel_shuffle(y, 2)
    F.unfold(y, 2)
    F.avg_pool2d(y, 2)
    F.max_pool2d(y, 2)
    F.lp_pool2d(y, 2.0, 2)
    F.adaptive_avg_pool2d(y, 3)
    F.adaptive_max_pool2d(y, 3)
    for padding in ("constant", "reflect", "replicate"):
        F.pad(y, (1, 1, 1, 1), mode=padding)


def convolutions(one: Tensor, two: Tensor, three: Tensor) -> None:
    for name, x in (("1d", one), ("2d", two), ("3d", three)):
        getattr(F, f"conv{name}")(x, x[:, :2], x[0].flatten()[:4], groups=2, padding=1)
        getattr(F, f"conv_transpose{name}")(x, x, stride=2)
    F.conv2d(two, two, padding="same")
    torch.conv_tbc(one, one.transpose(1, 2), one[0, :, 0])


def embeddings(embed: nn.Module, bag: nn.Module, head: nn.Module, tokens: Tensor) -> None:
    head(embed(tokens))
    head(bag(tokens))


def attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v, is_causal=True)
    F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(4, 4, device=q.device))


def score(model: nn.Module, x: Tensor, classes: Tensor) -> None:
    F.cross_entropy(model(x), classes)


def translate(model: nn.Module, source: Tensor, target: Tensor, mask: Tensor) -> None:
    F.mse_loss(model(source, target, tgt_mask=mask, tgt_is_causal=True), target)


def dice(model: nn.Module, x: Tensor) -> None:
    chance = model(x).softmax(1)[:, 1]
    _ = 1 - 2 * chance.sum() / (chance.sum() + 1)


def adversary(make: nn.Module, judge: nn.Module, noise: Tensor, real: Tensor) -> None:
    fake = make(noise)
    F.binary_cross_entropy_with_logits(judge(fake), torch.ones(4, 1, device=noise.device))
    _ = F.softplus(judge(real)).mean() + F.softplus(-judge(fake.detach())).mean()


CASES: dict[str, Case] = {
    "MLP with dropout": (
        lambda: (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)), torch.randn(2, 4), index(0, 1)),
        inside(score),
    ),
    "ResNet-18": (lambda: (ResNet18(), torch.randn(2, 3, 16, 16), index(0, 1)), inside(score)),
    "transformer": (
        lambda: (
            # Dropout of fp32, with which it begins, is several operations on a CPU and one on CUDA; that of half is compared above.
            nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True),
            torch.randn(2, 6, 16),
            torch.randn(2, 5, 16),
            nn.Transformer.generate_square_subsequent_mask(5),
        ),
        inside(translate, math=True),
    ),
    "ViT block": (lambda: (VitBlock(), torch.randn(2, 3, 8, 8), index(0, 1)), inside(score, math=True)),
    "attention that returns its weights": (
        lambda: (nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 6, 16)),
        inside(lambda layer, x: layer(x, x, x)),
    ),
    "attention": (lambda: (weight(2, 2, 4, 8), weight(2, 2, 4, 8), weight(2, 2, 4, 8)), inside(attention, math=True)),
    "U-Net": (lambda: (UNet(), torch.randn(2, 3, 8, 8)), inside(dice)),
    "GAN": (
        lambda: (
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()),
            nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
            torch.randn(4, 4),
            torch.randn(4, 8),
        ),
        inside(adversary),
    ),
    "losses": (lambda: (weight(4, 4), torch.randn(4, 4), index(0, 1, 2, 3)), inside(losses)),
    "products": (lambda: (weight(4, 4), weight(4, 4)), inside(products)),
    "convolutions": (lambda: (weight(4, 4, 3), weight(4, 4, 3, 3), weight(4, 4, 2, 2, 2)), inside(convolutions)),
    "reductions": (lambda: (weight(4, 4),), inside(reductions)),
    "pointwise": (lambda: (weight(4, 4),), inside(pointwise)),
    "activations": (lambda: (weight(4, 4), weight(1)), inside(activations)),
    "norms": (lambda: (weight(4, 4), weight(4)), inside(norms)),
    "promotion": (lambda: (weight(4, 4),), inside(promoting)),
    "powers and numbers": (lambda: (weight(4, 4),), inside(pow_and_scalars)),
    "images": (lambda: (torch.randn(2, 3, 4, 4), weight(4, 3, 1, 1)), inside(images)),
    "embeddings": (
        lambda: (nn.Embedding(5, 4), nn.EmbeddingBag(5, 4, mode="sum"), nn.Linear(4, 4), index(1, 1, 2)[None]),
        inside(embeddings),
    ),
    "a weight that is used four times": (lambda: (torch.randn(2, 4), weight(4, 4)), inside(shared_weight)),
    "a view that is a leaf": (lambda: (torch.randn(2, 8),), view_that_is_a_leaf),
    "regions in regions": (lambda: (nn.Linear(4, 4), torch.randn(2, 4)), nested),
    "without a cache": (lambda: (nn.Linear(4, 4), torch.randn(2, 4)), without_cache),
    "first without gradients": (lambda: (nn.Linear(4, 4), torch.randn(2, 4)), evaluated_first),
    "custom_fwd": (lambda: (weight(4, 4),), custom_forward),
}
