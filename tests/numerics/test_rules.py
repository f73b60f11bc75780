"""Every rule against its op: the parts of each cut make up the whole op, forward and backward, in float64."""

import itertools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import rota.testing
from rota.errors import RuleError
from rota.graph import rules
from rota.graph.graph import Tensor
from rota.graph.notation import parse
from rota.graph.part import Offsets, Place, compute_part
from rota.graph.positional import uniform
from rota.graph.refine import refine
from rota.plan.box import Box
from rota.testing import check_rule
from rota.testing.rules import _graph_of

aten = torch.ops.aten


def floats(*shape):
    """Between 0.1 and 0.9, where every function is defined; the same for the same shape."""
    generator = torch.Generator().manual_seed(hash(shape) % 1000)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1


def ints(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(len(shape)))


def bools(*shape):
    return ints(2, *shape).bool()


class Example:
    """An op with arguments, and the dims along which it must be cuttable."""

    def __init__(self, op, *args, dims, **kwargs):
        self.op, self.args, self.dims, self.kwargs = op, args, set(dims.split()), kwargs

    @property
    def kind(self):
        """As `kinds()` has it."""
        name, overload = self.op._schema.name.removeprefix("aten::"), self.op._overloadname
        name = name.strip("_") if name.startswith("__") else name
        if self.kwargs.get("dropout_p"):
            return f"{name}.dropout"
        return f"{name}.{overload}" if f"{name}.{overload}" in rules.kinds() else name

    def __str__(self):
        return f"{self.op}{[tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in self.args]}"


def unary(names, dims="d0 d2"):
    return [Example(getattr(aten, name).default, floats(4, 1, 3), dims=dims) for name in names.split()]


def binary(names, *, overload="Tensor", make=floats):
    """With broadcasting on both sides."""
    return [
        Example(getattr(getattr(aten, name), overload), make(4, 1, 3), make(5, 1), dims="d0 d1 d2")
        for name in names.split()
    ]


E = Example
x, y = floats(4, 1, 6), floats(5, 1)

POINTWISE = [
    *unary("abs neg exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan tanh sigmoid relu relu6 gelu silu"),
    *unary("elu leaky_relu hardswish hardsigmoid hardtanh mish softplus selu celu erf floor ceil round trunc sign"),
    *unary("logical_not isnan isinf isfinite isneginf isposinf nan_to_num square logit log_sigmoid"),
    *unary("clone contiguous detach zeros_like ones_like empty_like _to_copy"),
    *unary(
        "sinh cosh asin acos atan asinh atanh erfc erfinv lgamma digamma log10 frac sgn positive hardshrink softshrink"
    ),
    *unary("real"),
    *binary("xlogy copysign"),
    *binary("hypot logaddexp", overload="default"),
    E(aten.acosh.default, x + 1, dims="d0 d2"),
    E(aten.threshold.default, x, 0.3, 0.1, dims="d0 d2"),
    E(aten.imag.default, torch.complex(x, x), dims="d0 d2"),
    E(aten.clip.default, x, 0.2, 0.5, dims="d0 d2"),
    *binary("add sub mul div fmod remainder eq ne lt le gt ge rsub"),
    *binary("floor_divide maximum minimum atan2 logical_and logical_or logical_xor", overload="default"),
    *binary("bitwise_and bitwise_or", make=lambda *shape: ints(8, *shape)),
    *binary("__and__ __or__ __xor__", make=lambda *shape: ints(8, *shape)),
    *binary("max min", overload="other"),
    *binary("pow", overload="Tensor_Tensor"),
    E(aten.bitwise_not.default, ints(8, 4, 3), dims="d0 d1"),
    E(aten.pow.Tensor_Scalar, x, 2.5, dims="d0 d2"),
    E(aten.pow.Scalar, 2.5, x, dims="d0 d2"),
    E(aten.add.Tensor, x, 2, dims="d0 d2"),
    E(aten.add.Tensor, x, y, alpha=3, dims="d0 d1 d2"),
    E(aten.add.Tensor, x, floats(), dims="d0 d2"),
    E(aten.add.Tensor, floats(), floats(), dims=""),
    E(aten.add.Tensor, floats(1, 1), floats(1), dims=""),
    E(aten.mul.Tensor, x, 0.5, dims="d0 d2"),
    E(aten.div.Tensor_mode, x, y, rounding_mode="floor", dims="d0 d1 d2"),
    E(aten.div.Scalar_mode, x, 3, rounding_mode="trunc", dims="d0 d2"),
    E(aten.gelu.default, x, approximate="tanh", dims="d0 d2"),
    E(aten.clamp.default, x, 0.2, 0.5, dims="d0 d2"),
    E(aten.clamp.Tensor, x, floats(6), floats(1), dims="d0 d2"),
    E(aten.clamp_min.default, x, 0.4, dims="d0 d2"),
    E(aten.clamp_max.default, x, 0.4, dims="d0 d2"),
    E(aten.where.self, bools(5, 6), x, y, dims="d0 d1 d2"),
    E(aten.where.ScalarOther, bools(5, 6), x, 1.0, dims="d0 d1 d2"),
    E(aten.masked_fill.Scalar, x, bools(6), -math.inf, dims="d0 d2"),
    E(aten.masked_fill.Tensor, x, bools(5, 1), floats(), dims="d0 d1 d2"),
    E(aten.fill.Scalar, x, 2.0, dims="d0 d2"),
    E(aten.fill.Tensor, x, floats(), dims="d0 d2"),
    E(aten.full_like.default, x, 2.0, dims="d0 d2"),
    E(aten.addcmul.default, x, y, floats(6), value=0.5, dims="d0 d1 d2"),
    E(aten.addcdiv.default, x, y, floats(6), dims="d0 d1 d2"),
    E(aten.lerp.Tensor, x, y, floats(6), dims="d0 d1 d2"),
    E(aten.lerp.Scalar, x, y, 0.3, dims="d0 d1 d2"),
    E(aten.to.dtype, x, torch.float32, dims="d0 d2"),
    E(aten.to.other, x, floats(2, 3, 4, 5), dims="d0 d2"),
    E(aten.type_as.default, x, ints(3, 2, 3, 4, 5), dims="d0 d2"),
    E(aten.expand_as.default, y, floats(3, 5, 4), dims="d0 d1 d2"),
]

PRODUCTS = [
    E(aten.linear.default, floats(2, 3, 4), floats(5, 4), floats(5), dims="d0 d1 k n"),
    E(aten.linear.default, floats(4), floats(5, 4), dims="k n"),
    E(aten.linear.default, floats(3, 1), floats(1, 1), floats(1), dims="d0"),
    E(aten.mm.default, floats(3, 4), floats(4, 5), dims="m k n"),
    E(aten.bmm.default, floats(2, 3, 4), floats(2, 4, 5), dims="b m k n"),
    E(aten.mv.default, floats(3, 4), floats(4), dims="m k"),
    E(aten.dot.default, floats(4), floats(4), dims="k"),
    E(aten.matmul.default, floats(4), floats(4), dims="k"),
    E(aten.addmm.default, floats(5), floats(3, 4), floats(4, 5), dims="m k n"),
    E(aten.addmm.default, floats(3, 1), floats(3, 4), floats(4, 5), beta=2, alpha=0.5, dims="m k n"),
    E(aten.addmm.default, floats(), floats(3, 4), floats(4, 5), dims="m k n"),
    E(aten.baddbmm.default, floats(3, 5), floats(2, 3, 4), floats(2, 4, 5), beta=2, alpha=0.5, dims="b m k n"),
    E(aten.einsum.default, "bij,bjk->bik", [floats(2, 3, 4), floats(2, 4, 5)], dims="b i j k"),
    E(aten.einsum.default, "bsic,bsjd->bijcd", [floats(2, 3, 4, 2), floats(2, 3, 2, 3)], dims="b s i c j d"),
    E(aten.einsum.default, "bte, betw -> btw", [floats(2, 3, 4), floats(2, 4, 3, 2)], dims="b t e w"),
    E(aten.einsum.default, "ij,jk", [floats(3, 4), floats(4, 2)], dims="i j k"),
    E(aten.einsum.default, "ij->", [floats(3, 4)], dims="i j"),
    E(aten.einsum.default, "...ij,...jk->...ik", [floats(2, 3, 4), floats(4, 2)], dims="d0 i j k"),
    E(aten.einsum.default, "i,j->ij", [floats(3), floats(4)], dims="i j"),
    E(aten.einsum.default, "ii->i", [floats(3, 3)], dims=""),
    E(aten.einsum.default, "...i->i", [floats(2, 3)], dims=""),
    E(aten.embedding.default, floats(6, 4), ints(6, 2, 3), dims="v e d0 d1"),
    E(aten.embedding.default, floats(6, 4), ints(6, 5, 6), 2, dims="v e d0 d1"),
    E(aten.embedding.default, floats(6, 4), ints(6), dims="v e"),
    E(aten.embedding.default, floats(6, 4), ints(6, 3), -1, True, dims=""),
    E(aten.conv1d.default, floats(2, 4, 9), floats(6, 4, 3), floats(6), [2], [1], dims="b k n"),
    E(aten.conv2d.default, floats(2, 3, 7, 6), floats(4, 3, 3, 2), floats(4), [2, 1], [1, 0], dims="b k n"),
    E(aten.conv2d.default, floats(2, 3, 7, 6), floats(4, 3, 3, 2), None, [1, 1], [1, 0], [2, 1], dims="b k n"),
    E(
        aten.conv2d.default,
        floats(2, 6, 5, 5),
        floats(4, 3, 3, 3),
        floats(4),
        [1, 1],
        [1, 1],
        [1, 1],
        2,
        dims="b g k n",
    ),
    E(aten.conv2d.default, floats(2, 4, 5, 5), floats(8, 1, 3, 3), floats(8), groups=4, dims="b g n"),
    E(aten.conv2d.default, floats(3, 5, 5), floats(4, 3, 3, 3), floats(4), dims="k n"),
    E(aten.conv2d.default, floats(2, 3, 6, 8), floats(4, 3, 3, 2), floats(4), [3, 2], dims="b k n s0 s1"),
    E(aten.conv2d.default, floats(2, 3, 4, 5), floats(4, 3, 1, 1), floats(4), dims="b k n s0 s1"),
    E(aten.conv2d.padding, floats(2, 3, 4, 5), floats(4, 3, 3, 3), floats(4), [1, 1], "same", dims="b k n"),
    E(aten.conv3d.default, floats(2, 2, 4, 4, 4), floats(2, 2, 2, 3, 3), floats(2), dims="b k n"),
    E(aten.conv_transpose1d.default, floats(2, 4, 5), floats(4, 3, 3), floats(3), [2], dims="b k n"),
    E(aten.conv_transpose2d.input, floats(2, 4, 3, 5), floats(4, 3, 3, 2), None, [2, 2], [1, 0], [1, 0], dims="b k n"),
    E(aten.conv_transpose2d.input, floats(2, 6, 3, 5), floats(6, 2, 3, 2), floats(6), groups=3, dims="b g k n"),
    E(aten.conv_transpose2d.input, floats(4, 3, 5), floats(4, 3, 3, 2), floats(3), dims="k n"),
    E(aten.conv_transpose3d.input, floats(2, 2, 2, 3, 2), floats(2, 3, 2, 2, 2), floats(3), dims="b k n"),
    E(aten.bilinear.default, floats(2, 3), floats(2, 4), floats(5, 3, 4), floats(5), dims="d0 i j n"),
]


def recurrent(op, state, gates):
    """Two layers of width five over sequences of features of width four."""
    weights = [floats(gates * 5, width) for layer in (4, 5) for width in (layer, 5)]
    settings = (weights, False, 2)
    return [
        E(op, floats(6, 3, 4), state, *settings, 0.0, True, False, False, dims="b"),
        E(op, floats(3, 6, 4), state, *settings, 0.0, True, False, True, dims="b"),
        E(op, floats(6, 3, 4), state, *settings, 0.5, False, False, False, dims="b"),
    ]


ALONG = [
    *(E(getattr(aten, f).int, floats(3, 4, 5), 1, dims="d0 d2") for f in ("softmax", "log_softmax")),
    E(aten.softmax.int, floats(3, 4), -1, torch.float32, dims="d0"),
    *(E(getattr(aten, f).default, floats(3, 4, 5), -1, dims="d0 d1") for f in ("cumsum", "cumprod", "argsort", "sort")),
    E(aten.sort.stable, floats(3, 4), stable=True, dim=0, dims="d1"),
    E(aten.topk.default, floats(3, 4), 2, 0, dims="d1"),
    E(aten.topk.default, floats(3, 4), 2, dims="d0"),
    E(aten.flip.default, floats(3, 4, 5), [0, -1], dims="d1"),
    E(aten.logsumexp.default, floats(3, 4, 5), [1], True, dims="d0 d2"),
    *(E(getattr(aten, f).default, floats(3, 4), dims="") for f in ("min", "max", "amax", "amin", "prod", "var", "std")),
    *(E(getattr(aten, f).dim, floats(3, 4), 0, keep, dims="d1") for f in ("min", "max") for keep in (True, False)),
    *(E(getattr(aten, f).default, floats(3, 4, 2), [0, 2], dims="d1") for f in ("amax", "amin")),
    *(E(getattr(aten, f).default, floats(3, 4), 1, keep, dims="d0") for f in ("argmax", "argmin") for keep in (1, 0)),
    *(E(getattr(aten, f).dim, bools(3, 4), 1, dims="d0") for f in ("all", "any")),
    *(E(getattr(aten, f).correction, floats(3, 4), [1], correction=0, dims="d0") for f in ("var", "std")),
    E(aten.var.default, floats(3, 4), False, dims=""),
    E(aten.var.dim, floats(3, 4), [0], False, True, dims="d1"),
    E(aten.prod.dim_int, floats(3, 4), 0, dims="d1"),
    E(aten.sum.default, floats(3, 4), dims="d0 d1"),
    E(aten.sum.default, floats(), dims=""),
    E(aten.sum.default, ints(5, 3, 4), dims="d0 d1"),
    E(aten.mean.default, floats(3, 4), dims="d0 d1"),
    E(aten.mean.dim, floats(3, 4).float(), [1], True, dtype=torch.float64, dims="d0 d1"),
    E(aten.layer_norm.default, floats(2, 3, 4), [4], floats(4), floats(4), dims="d0 d1"),
    E(aten.layer_norm.default, floats(2, 3, 4), [3, 4], dims="d0"),
    E(aten.rms_norm.default, floats(2, 3, 4), [4], floats(4), dims="d0 d1"),
    E(aten.group_norm.default, floats(2, 6, 3), 3, floats(6), floats(6), dims="b g"),
    E(aten.group_norm.default, floats(4, 6, 3, 2), 2, dims="b g"),
    E(aten.group_norm.default, floats(4, 6), 1, dims="b"),
    E(aten.adaptive_avg_pool1d.default, floats(2, 3, 8), [2], dims="d0 d1"),
    E(aten.adaptive_avg_pool2d.default, floats(2, 3, 8, 8), [2, 1], dims="d0 d1"),
    E(aten.avg_pool1d.default, floats(3, 8), [2], dims="d0"),
    E(aten.avg_pool2d.default, floats(2, 3, 8, 8), [2, 2], dims="d0 d1"),
    E(aten.max_pool1d.default, floats(2, 3, 8), [2], dims="d0 d1"),
    E(aten.max_pool2d.default, floats(2, 3, 8, 8), [2, 2], dims="d0 d1"),
    E(aten.max_pool2d_with_indices.default, floats(2, 3, 8, 8), [2, 2], dims="d0 d1"),
    E(aten.max_pool3d_with_indices.default, floats(2, 3, 4, 4, 4), [2, 2, 2], dims="d0 d1"),
    *(
        E(getattr(aten, f).default, floats(2, 3, 4, 4, 4), [2, 2, 2], dims="d0 d1")
        for f in ("avg_pool3d", "max_pool3d")
    ),
    E(aten.adaptive_avg_pool3d.default, floats(2, 3, 4, 4, 4), [2, 1, 2], dims="d0 d1"),
    *(
        E(getattr(aten, f"adaptive_max_pool{n}d").default, floats(2, 3, *[4] * n), [2] * n, dims="d0 d1")
        for n in (1, 2, 3)
    ),
    *(
        E(getattr(aten, f"upsample_nearest{n}d").vec, floats(2, 3, *[4] * n), None, [2.0] * n, dims="d0 d1")
        for n in (1, 2, 3)
    ),
    *(
        E(getattr(aten, f"upsample_{kind}").vec, floats(2, 3, *[4] * n), [6] * n, True, None, dims="d0 d1")
        for kind, n in (("linear1d", 1), ("bilinear2d", 2), ("bicubic2d", 2), ("trilinear3d", 3))
    ),
    *(E(getattr(aten, f).default, floats(3, 4, 5), -1, dims="d0 d1") for f in ("logcumsumexp", "cummax", "cummin")),
    E(aten.median.dim, floats(3, 4), 1, dims="d0"),
    E(aten.count_nonzero.dim_IntList, bools(3, 4), [0], dims="d1"),
    *(E(getattr(aten, f).correction, floats(3, 4), [1], correction=0, dims="d0") for f in ("var_mean", "std_mean")),
    E(aten.norm.ScalarOpt_dim, floats(3, 4), 2, [1], dims="d0"),
    E(aten.norm.Scalar, floats(3, 4), 2, dims=""),
    E(aten.linalg_vector_norm.default, floats(3, 4, 2), 1, [0, 2], True, dims="d1"),
    E(aten.linalg_vector_norm.default, floats(3, 4), dims=""),
    E(aten.glu.default, floats(3, 4, 6), -1, dims="d0 d1 d2"),
    E(aten.glu.default, floats(3, 4, 6), 1, dims="d0 d1 d2"),
    E(aten.prelu.default, floats(3, 4, 6), floats(4), dims="d0 d1 d2"),
    E(aten.prelu.default, floats(3, 4), floats(1), dims="d0 d1"),
    E(aten.grid_sampler.default, floats(2, 3, 4, 5), floats(2, 6, 2, 2), 0, 0, False, dims="b c s0 s1"),
    E(aten.pixel_shuffle.default, floats(2, 12, 3, 4), 2, dims="d0 c h w"),
    *(
        example
        for name in ("gru", "rnn_tanh", "rnn_relu")
        for example in recurrent(getattr(aten, name).input, floats(2, 3, 5), 3 if name == "gru" else 1)
    ),
    *recurrent(aten.lstm.input, [floats(2, 3, 5), floats(2, 3, 5) ** 2], 4),
]


def normalised(op, *, from_input, running, dims, shape=(4, 3, 2, 5)):
    averages = [floats(3), floats(3)] if running else [None, None]
    return E(op, floats(*shape), floats(3), floats(3), *averages, from_input, 0.1, 1e-5, False, dims=dims)


NORMS = [
    normalised(aten.batch_norm.default, from_input=True, running=True, dims="c"),
    normalised(aten.batch_norm.default, from_input=True, running=False, dims="c"),
    normalised(aten.batch_norm.default, from_input=False, running=True, dims="b c s0 s1"),
    normalised(aten.batch_norm.default, from_input=False, running=True, dims="b c", shape=(4, 3)),
    normalised(aten.instance_norm.default, from_input=True, running=False, dims="b c"),
    normalised(aten.instance_norm.default, from_input=True, running=True, dims="c"),
    normalised(aten.instance_norm.default, from_input=False, running=True, dims="b c s0 s1"),
]

TARGETS = torch.tensor([0, 3, -100, 1, 2, 0])
SIGNS = ints(2, 3, 4) * 2.0 - 1
TRIPLET = (floats(3, 4), floats(3, 4) ** 2, floats(3, 4).sqrt())

LOSSES = [
    E(aten.cross_entropy_loss.default, floats(6, 4), TARGETS, None, 2, dims="b"),
    E(aten.cross_entropy_loss.default, floats(6, 4), TARGETS, None, 0, dims="b"),
    E(aten.cross_entropy_loss.default, floats(6, 4), TARGETS.clamp_min(0), floats(4), 2, 3, dims="b"),
    E(aten.cross_entropy_loss.default, floats(6, 4), TARGETS, floats(4), 2, -100, 0.2, dims="b"),
    E(aten.cross_entropy_loss.default, floats(6, 4), TARGETS, floats(4), 0, -100, 0.2, dims="b"),
    E(aten.cross_entropy_loss.default, floats(2, 4, 3, 5), ints(4, 2, 3, 5), None, 2, dims="b s0 s1"),
    E(aten.cross_entropy_loss.default, floats(2, 4, 3, 5), ints(4, 2, 3, 5), None, 0, dims="b s0 s1"),
    E(aten.cross_entropy_loss.default, floats(3, 4), floats(3, 4), None, 2, dims="b"),
    E(aten.cross_entropy_loss.default, floats(3, 4, 2), floats(3, 4, 2), floats(4), 0, -100, 0.1, dims="b s0"),
    E(aten.cross_entropy_loss.default, floats(4), ints(4), None, 2, dims=""),
    E(aten.cross_entropy_loss.default, floats(6, 4), TARGETS, dims=""),  # its mean is rewritten when it is captured
    E(aten.nll_loss.default, floats(6, 4), TARGETS, floats(4), 2, dims="b"),
    E(aten.nll_loss.default, floats(6, 4), TARGETS, None, 0, dims="b"),
    E(aten.nll_loss_nd.default, floats(2, 4, 3), ints(4, 2, 3), None, 2, dims="b s0"),
    *(
        E(getattr(aten, name).default, floats(3, 4), floats(3, 4).sqrt(), reduction=reduction, dims="d0 d1")
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")
        for reduction in (0, 1, 2)
    ),
    *(
        E(aten.poisson_nll_loss.default, floats(3, 4), floats(3, 4), True, full, 1e-8, reduction, dims="d0 d1")
        for full in (False, True)
        for reduction in (0, 1, 2)
    ),
    *(
        example
        for reduction in (0, 1, 2)
        for example in (
            E(aten.hinge_embedding_loss.default, floats(3, 4), SIGNS, 1.0, reduction, dims="d0 d1"),
            E(aten.margin_ranking_loss.default, floats(3, 4), floats(3, 1), SIGNS, 0.1, reduction, dims="d0 d1"),
            E(aten.multi_margin_loss.default, floats(6, 4), TARGETS.clamp_min(0), reduction=reduction, dims="d0"),
            E(
                aten.multi_margin_loss.default,
                floats(6, 4),
                TARGETS.clamp_min(0),
                2,
                0.5,
                floats(4),
                reduction,
                dims="d0",
            ),
            E(aten.multilabel_margin_loss.default, floats(3, 4), ints(4, 3, 4), reduction, dims="d0"),
            E(
                aten.cosine_embedding_loss.default,
                floats(3, 4),
                floats(3, 4) ** 2,
                SIGNS[:, 0],
                0.1,
                reduction,
                dims="d0",
            ),
            E(aten.triplet_margin_loss.default, *TRIPLET, swap=True, reduction=reduction, dims="d0"),
            E(
                aten.triplet_margin_loss.default,
                *(x.expand(2, 3, 4) for x in TRIPLET),
                reduction=reduction,
                dims="d0 d1",
            ),
        )
    ),
    E(aten.multi_margin_loss.default, floats(4), ints(4), dims=""),
    E(aten.triplet_margin_loss.default, TRIPLET[0], TRIPLET[1], TRIPLET[2][:1], dims=""),
    E(aten.pairwise_distance.default, floats(2, 3, 4), floats(3, 4) ** 2, dims="d0 d1"),
    E(aten.pairwise_distance.default, floats(3, 4), floats(3, 4) ** 2, 1.0, keepdim=True, dims="d0"),
    E(aten.cosine_similarity.default, floats(3, 4, 2), floats(3, 1, 2), 1, dims="d0 d2"),
    E(aten.cosine_similarity.default, floats(3, 4), floats(3, 4) ** 2, -1, dims="d0"),
    E(aten.cdist.default, floats(2, 3, 4), floats(2, 5, 4) ** 2, dims="d0 p r"),
    *(
        E(getattr(aten, name).default, floats(3, 4), bools(3, 4).double(), floats(4), reduction=reduction, dims="d0 d1")
        for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits")
        for reduction in (0, 1, 2)
    ),
]

VIEWS = [
    E(aten.view.default, floats(2, 3, 8), [2, 3, 2, 4], dims="v0 v1 v2 v3"),
    E(aten.view.default, floats(6, 8), [2, 3, 2, 4], dims="v0 v1 v2 v3"),
    E(aten.view.default, floats(6), [-1, 1, 2], dims="v0 v1"),
    E(aten.view.default, floats(2, 3), [3, 2], dims=""),  # no common factors
    E(aten.view.dtype, ints(5, 3, 2), torch.int32, dims=""),
    E(aten.reshape.default, floats(2, 3, 4).mT, [2, 12], dims="v0 v1 v2"),
    E(aten._unsafe_view.default, floats(2, 12), [2, 3, 4], dims="v0 v1 v2"),
    E(aten.flatten.using_ints, floats(2, 3, 4), 0, 1, dims="v0 v1 v2"),
    E(aten.flatten.using_ints, floats(), dims=""),
    E(aten.unflatten.int, floats(2, 12), 1, [3, -1], dims="v0 v1 v2"),
    E(aten.unsqueeze.default, floats(2, 3), -1, dims="v0 v1"),
    E(aten.unsqueeze.default, floats(), 0, dims=""),
    E(aten.squeeze.default, floats(2, 1, 3), dims="v0 v1"),
    E(aten.squeeze.dim, floats(2, 1, 3), 0, dims="v0 v1"),
    E(aten.permute.default, floats(2, 3, 4), [2, -3, 1], dims="d0 d1 d2"),
    E(aten.transpose.int, floats(2, 3, 4), -1, 0, dims="d0 d1 d2"),
    E(aten.transpose.int, floats(), 0, -1, dims=""),
    E(aten.swapaxes.default, floats(2, 3, 4), 1, 2, dims="d0 d1 d2"),
    E(aten.movedim.int, floats(2, 3, 4), 0, -1, dims="d0 d1 d2"),
    E(aten.movedim.intlist, floats(2, 3, 4, 5), [3, 0], [1, 0], dims="d0 d1 d2 d3"),
    E(aten.t.default, floats(2, 3), dims="d0 d1"),
    E(aten.t.default, floats(3), dims="d0"),
    E(aten.mT.default, floats(2, 3, 4), dims="d0 d1 d2"),
    E(aten.numpy_T.default, floats(2, 3, 4), dims="d0 d1 d2"),
    E(aten.expand.default, floats(3, 1, 4), [2, 3, 5, -1], dims="d0 d1 d2 d3"),
    E(aten.broadcast_to.default, floats(3, 1), [3, 4], dims="d0 d1"),
    E(aten.broadcast_tensors.default, [floats(3, 1), floats(4), floats(2, 3, 4)], dims="d0 d1 d2"),
    E(aten.scatter.src, floats(3, 4), 1, ints(4, 3, 4).sort(1).values, floats(3, 4) + 1, dims="d0"),
    E(aten.scatter.value, floats(3, 4), 0, ints(3, 2, 4), 0.5, dims="d1"),
    E(aten.scatter_add.default, floats(3, 4), 1, ints(4, 3, 2), floats(3, 2), dims="d0"),
    E(aten.one_hot.default, ints(4, 2, 3), 4, dims="d0 d1"),
    E(aten.repeat.default, floats(3, 4), [2, 1, 3], dims="r0 d1 r2 d2"),
    E(aten.repeat_interleave.self_int, floats(3, 4), 2, -1, dims="d0 d1 r"),
    E(aten.repeat_interleave.self_int, floats(3, 4), 2, dims=""),
    E(aten.tril.default, floats(2, 3, 4), 1, dims="d0"),
    E(aten.triu.default, floats(2, 3, 4), dims="d0"),
    E(aten.roll.default, floats(2, 3, 4), [1, 2], [1, 2], dims="d0"),
    E(aten.roll.default, floats(2, 3), [1], dims=""),
    E(aten.diff.default, floats(2, 3, 4), 1, 1, dims="d0 d2"),
    E(aten.diff.default, floats(2, 4), 1, -1, floats(2, 1), floats(2, 2), dims="d0"),
    E(aten.slice.Tensor, floats(2, 9, 4), 1, 3, 6, dims="d0 d1 d2"),  # the second of three blocks
    E(aten.slice.Tensor, floats(2, 6), -1, -3, dims="d0 d1"),
    E(aten.slice.Tensor, floats(2, 6), 1, 0, 2**63 - 1, dims="d0 d1"),
    E(aten.slice.Tensor, floats(2, 6), 1, 1, 4, dims="d0"),
    E(aten.slice.Tensor, floats(2, 6), 1, 0, 6, 2, dims="d0"),
    E(aten.narrow.default, floats(6, 3), 0, 2, 2, dims="d0 d1"),
    E(aten.narrow.default, floats(6, 3), 0, 1, 4, dims="d1"),
    E(aten.slice_scatter.default, floats(2, 6), floats(2, 3), 1, 1, 4, dims="d0"),
    E(aten.select.int, floats(2, 3, 4), -2, 1, dims="d0 d2"),
    E(aten.unbind.int, floats(3, 2, 4), dims="d1 d2"),
    E(aten.select_scatter.default, floats(2, 3, 4), floats(2, 4), 1, -1, dims="d0 d2"),
    E(aten.split.Tensor, floats(2, 3, 12), 4, -1, dims="d0 d1 d2"),
    E(aten.split.Tensor, floats(2, 7), 3, 1, dims="d0"),
    E(aten.split_with_sizes.default, floats(6, 2), [2, 4], dims="d1"),
    E(aten.split_with_sizes.default, floats(6, 2), [3, 3], dims="d0 d1"),
    E(aten.chunk.default, floats(2, 6), 2, 1, dims="d0 d1"),
    E(aten.cat.default, [floats(2, 3), floats(2, 3)], -1, dims="d0 d1"),
    E(aten.cat.default, [floats(2, 3), floats(4, 3)], dims="d1"),
    E(aten.concat.default, [floats(2, 3), floats(2, 3), floats(2, 3)], dims="d0 d1"),
    E(aten.stack.default, [floats(2, 3), floats(2, 3)], 1, dims="d0 d2"),
    E(aten.stack.default, [floats(), floats()], dims=""),
    E(aten.pad.default, floats(2, 3, 4), [1, 2, 0, 0], dims="d0 d1"),
    E(aten.pad.default, floats(2, 3, 4), [1, 2], "reflect", dims="d0 d1"),
    E(aten.constant_pad_nd.default, floats(2, 3), [0, 0, 1, 0], 5.0, dims="d1"),
    E(aten.gather.default, floats(2, 5, 4), 1, ints(5, 2, 3, 4), dims="d0 d1 d2"),
    E(aten.gather.default, floats(4, 5), 1, ints(5, 2, 3), dims="d1"),
    E(aten.take_along_dim.default, floats(2, 5, 1), ints(5, 1, 3, 4), 1, dims="d0 d1 d2"),
    E(aten.take_along_dim.default, floats(2, 5), ints(10, 3), dims=""),
    E(aten.index_select.default, floats(2, 5, 4), 1, ints(5, 3), dims="d0 d1 d2"),
    E(aten.index.Tensor, floats(6, 3), [ints(6, 4)], dims="i0 d1"),
    E(aten.index.Tensor, floats(6, 3), [ints(6)], dims="d1"),
    E(aten.index.Tensor, floats(6, 5, 3), [ints(5, 4), ints(5, 4)], dims="i0 d2"),
    E(aten.index.Tensor, floats(2, 6, 5), [None, ints(5, 4, 1), ints(5, 3)], dims="d0 i0 i1"),
    E(aten.index.Tensor, floats(4, 3, 5), [ints(4, 2), None, ints(4, 2)], dims="i0 d1"),
    E(aten.index.Tensor, floats(2, 3, 4, 5), [None, ints(3, 6), None, ints(3, 6)], dims="d0 i0 d2"),
    E(aten.index.Tensor, floats(4, 3), [torch.ones(4, dtype=torch.bool)], dims=""),
]

DOUBLE = {"dtype": torch.float64}
CREATORS = [
    *(E(getattr(aten, name).default, [3, 1, 4], dims="d0 d2") for name in ("zeros", "ones")),
    E(aten.empty.memory_format, [3, 1, 4], dims="d0 d2"),
    E(aten.full.default, [3, 1, 4], 2.5, dims="d0 d2"),
    *(E(getattr(aten, f).default, floats(2), [3, 4], dims="d0 d1") for f in ("new_zeros", "new_ones", "new_empty")),
    E(aten.new_full.default, floats(2), [3, 4], 1.5, dims="d0 d1"),
    E(aten.scalar_tensor.default, 2.0, dims=""),
]
POSITIONAL = [
    E(aten.arange.default, 7, dims="d0"),
    E(aten.arange.start_step, 2, 20, 3, dims="d0"),
    E(aten.rand.default, [3, 4], **DOUBLE, dims="d0 d1"),
    E(aten.rand.default, [], dims=""),
    E(aten.randn.default, [3, 4], **DOUBLE, dims="d0 d1"),
    E(aten.dropout.default, floats(3, 4), 0.5, True, dims="d0 d1"),
    E(aten.dropout.default, floats(3, 4), 0.5, False, dims="d0 d1"),
    E(aten.dropout.default, floats(3, 4), 1.0, True, dims="d0 d1"),
    E(aten.bernoulli.default, floats(3, 4), dims="d0 d1"),
    E(aten.bernoulli.p, floats(3, 4), 0.3, dims="d0 d1"),
]

ATTENTION = aten.scaled_dot_product_attention.default


def attention(q, k, v, *rest, dims, **kwargs):
    return E(ATTENTION, floats(*q), floats(*k), floats(*v), *rest, dims=dims, **kwargs)


PLAIN = [(2, 4, 5, 3), (2, 4, 6, 3), (2, 4, 6, 2)]
GROUPED = [(2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 3)]
ATTENTIONS = [
    attention(*PLAIN, dims="d0 h l f"),
    attention(*PLAIN, scale=0.3, dims="d0 h l f"),
    attention(*PLAIN, is_causal=True, dims="d0 h l f"),
    attention((5, 3), (6, 3), (6, 2), dims="l f"),
    attention((4, 5, 3), (4, 6, 3), (4, 6, 2), is_causal=True, dims="h l f"),
    attention(*GROUPED, enable_gqa=True, dims="d0 h g l f"),
    attention(*GROUPED, enable_gqa=True, is_causal=True, dims="d0 h g l f"),
    attention(*GROUPED, floats(2, 4, 5, 6), enable_gqa=True, dims="d0 h g l f"),
    attention(*GROUPED, floats(2, 1, 1, 6), enable_gqa=True, dims="d0 h g l f"),
    attention((2, 4, 5, 3), (2, 1, 6, 3), (2, 1, 6, 3), enable_gqa=True, dims="d0 g l f"),
    attention(*PLAIN, dropout_p=0.4, dims="d0 h l f"),
    attention(*PLAIN, dropout_p=0.4, is_causal=True, dims="d0 h l f"),
    attention(*PLAIN, dropout_p=1.0, dims="d0 h l f"),
    attention(*PLAIN, floats(5, 6), dropout_p=0.4, scale=0.3, dims="d0 h l f"),
    attention(*GROUPED, bools(1, 4, 5, 6) | torch.eye(5, 6).bool(), enable_gqa=True, dropout_p=0.4, dims="d0 h g l f"),
    attention((5, 3), (6, 3), (6, 2), dropout_p=0.4, dims="l f"),
]

BLOCKS = [
    E(
        torch.ops.rota.block_scores.default,
        floats(5, 3, 4),
        ints(12, 5),
        torch.arange(0, 12, 4),
        12,
        -100,
        dims="n b",
    ),
]
EXAMPLES = [*POINTWISE, *PRODUCTS, *ALONG, *NORMS, *LOSSES, *VIEWS, *CREATORS, *POSITIONAL, *ATTENTIONS]


@pytest.mark.parametrize("example", [*EXAMPLES, *BLOCKS], ids=str)
def test_parts_make_up_the_whole_and_the_cuttable_dims_are_these(example):
    assert set(check_rule(example.op, *example.args, **example.kwargs)) == example.dims


def test_every_kind_has_an_example():
    own = {kind for kind in rules.kinds() if not kind.startswith(("testlib.", "rota."))}
    assert own - {example.kind for example in EXAMPLES} == set()


def _linear_together(linear, reads):
    """The sets of reads in each of which an op says that it is linear."""
    if linear is None or not reads:
        return []
    if linear is rules.Linear.EACH:
        return [{i} for i in range(reads)]
    return [{0}] if linear is rules.Linear.FIRST else [set(range(reads))]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_partial_sums_go_through_what_is_said_to_be_linear(example):
    graph, values = _graph_of(example.op, example.args, example.kwargs)
    op = graph.ops[0]
    rule = rules.rule_of(op)
    if rule is None or rules.added_number(op):
        return
    compute = compute_part(refine(graph), "op", {})
    for shared in _linear_together(rule.linear, len(values)):
        results = [
            compute([value * share if i in shared else value for i, value in enumerate(values)], Place(key=1))
            for share in (4, 1, 3)
        ]
        for whole, one, other in zip(*results, strict=True):
            assert torch.allclose(one + other, whole, rtol=1e-6)


X, Y = floats(2, 3), floats(2, 3) + 1
SUMS = [
    *((op.Tensor, (X, Y), {read}) for op in (aten.add, aten.sub, aten.rsub) for read in (0, 1)),
    *((op.Scalar, (X, 3.0), set()) for op in (aten.add, aten.sub, aten.rsub)),
    *((op.default, ([X, Y],), {read}) for op in (aten.cat, aten.stack) for read in (0, 1)),
]


@pytest.mark.parametrize(("op", "args", "once"), SUMS, ids=str)
def test_each_term_of_a_sum_adds_an_equal_part_of_what_is_no_partial_sum(op, args, once):
    graph, values = _graph_of(op, args, {})
    refined = refine(graph)
    (whole,) = compute_part(refined, "op", {})(values, Place(key=1))
    term = compute_part(refined, "op", {}, offsets=Offsets(reads=frozenset(once), terms=3))
    shares = [[value if i in once else value * share for i, value in enumerate(values)] for share in (2, -4, 3)]
    assert torch.allclose(sum(term(one, Place(key=1))[0] for one in shares), whole, rtol=1e-12)


@pytest.mark.parametrize("example", POSITIONAL, ids=str)
def test_numbers_by_position_are_the_same_in_parts_bit_by_bit(example):
    check_rule(example.op, *example.args, **example.kwargs, tolerance=0)


# ---- random shapes ----

sizes = st.integers(1, 6)
few = settings(max_examples=20)


def larger(**named):
    """The names of the dims that are not of size one."""
    return {name for name, size in named.items() if size > 1}


@few
@given(st.lists(sizes, max_size=3), sizes, sizes, st.booleans())
def test_linear_of_any_shape(lead, k, n, biased):
    found = check_rule(aten.linear.default, floats(*lead, k), floats(n, k), floats(n) if biased else None)
    assert set(found) == larger(**{f"d{i}": size for i, size in enumerate(lead)}, k=k, n=n)


@st.composite
def broadcast(draw, *, rank=3, count=2):
    """Shapes that broadcast together, and what they broadcast to."""
    whole = draw(st.lists(sizes, max_size=rank))
    shapes = []
    for _ in range(count):
        mine = [draw(st.sampled_from([size, 1])) for size in whole]
        shapes.append(tuple(mine[draw(st.integers(0, len(mine))) :]))
    return shapes, torch.broadcast_shapes(*shapes)


@few
@given(broadcast(), sizes, sizes, sizes, st.sampled_from(["mm", "vm", "mv", "vv"]))
def test_matmul_of_all_ranks(drawn, m, k, n, which):
    (left, right), lead = drawn
    a = (k,) if which[0] == "v" else (*left, m, k)
    b = (k,) if which[1] == "v" else (*right, k, n)
    lead = torch.broadcast_shapes(*([left] if which[0] == "m" else []), *([right] if which[1] == "m" else []), ())
    expected = {f"d{i}": size for i, size in enumerate(lead)} | {"k": k}
    expected |= ({"m": m} if which[0] == "m" else {}) | ({"n": n} if which[1] == "m" else {})
    assert set(check_rule(aten.matmul.default, floats(*a), floats(*b))) == larger(**expected)


@few
@given(broadcast(count=3))
def test_broadcasting(drawn):
    (a, b, c), whole = drawn
    expected = larger(**{f"d{i}": size for i, size in enumerate(whole)})
    assert set(check_rule(aten.addcmul.default, floats(*a), floats(*b), floats(*c))) == expected


@few
@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_sums_and_means_over_any_dims(shape, data):
    dims = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), unique_by=lambda dim: dim % len(shape)))
    keep = data.draw(st.booleans())
    every = {f"d{i}": size for i, size in enumerate(shape)}
    assert set(check_rule(aten.sum.dim_IntList, floats(*shape), dims, keep)) == larger(**every)
    assert set(check_rule(aten.mean.dim, floats(*shape), dims, keep)) == larger(**every)
    kept = {f"d{i}": size for i, size in enumerate(shape) if i not in {dim % len(shape) for dim in dims}}
    found = check_rule(aten.amax.default, floats(*shape), dims, keep)
    assert set(found) == (larger(**kept) if dims else set())


MASKS = [
    tuple(shape[drop:])
    for shape in itertools.product((2, 1), (4, 1), (5, 1), (6, 1))
    for drop in range(3)
    if all(size == 1 for size in shape[:drop])
]


@pytest.mark.parametrize("shape", sorted(set(MASKS)), ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attention_with_masks_of_all_shapes(shape, kind):
    mask = (bools(*shape) | (torch.arange(shape[-1]) == 0)) if kind == "bool" else floats(*shape)
    q, k, v = (floats(*one) for one in PLAIN)
    assert set(check_rule(ATTENTION, q, k, v, mask, parts=(2,))) == {"d0", "h", "l", "f"}


@few
@given(st.lists(sizes, min_size=1, max_size=3), st.integers(1, 3), st.data())
def test_splitting_and_concatenating_are_each_other(shape, count, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    every = larger(**{f"d{i}": size for i, size in enumerate(shape)})
    assert set(check_rule(aten.cat.default, [floats(*shape)] * count, dim)) == every
    whole = list(shape)
    whole[dim] *= count
    assert set(check_rule(aten.split.Tensor, floats(*whole), shape[dim], dim)) == every
    start = shape[dim] * data.draw(st.integers(0, count - 1))
    assert set(check_rule(aten.slice.Tensor, floats(*whole), dim, start, start + shape[dim])) == every


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_convolutions_in_groups(b, groups, k, n, stride, biased):
    weight, bias = floats(groups * n, k, 2, 3), floats(groups * n) if biased else None
    args = (floats(b, groups * k, 5, 5), weight, bias, [stride, 1], [1, 0], [1, 1], groups)
    assert set(check_rule(aten.conv2d.default, *args)) == larger(b=b, g=groups, k=k, n=n)


@few
@given(sizes, st.lists(sizes, min_size=1, max_size=2), st.data())
def test_a_vocabulary_cut_anywhere(v, shape, data):
    padding = data.draw(st.integers(-1, v - 1))
    found = check_rule(aten.embedding.default, floats(v, 3), ints(v, *shape), padding, parts=(2, 3, 4, 5, 6))
    assert set(found) == larger(v=v, e=3, **{f"d{i}": size for i, size in enumerate(shape)})


# ---- attention with dropout ----


def test_attention_drops_weights_by_their_position():
    q, k, v = floats(2, 3, 5, 4), floats(2, 3, 6, 4), torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6)
    graph, values = _graph_of(ATTENTION, [q, k, v], {"dropout_p": 0.4})
    compute = compute_part(refine(graph), "op", {})
    (dropped,) = compute(values, Place(key=7))
    weights = (q @ k.mT / 2).softmax(-1)
    kept = dropped != 0
    assert torch.allclose(dropped, weights * kept / 0.6, rtol=1e-12)
    assert 0.4 < kept.double().mean() < 0.8
    assert not torch.equal(compute(values, Place(key=8))[0] != 0, kept)
    assert torch.equal(compute(values, Place(key=7))[0], dropped)


def test_attention_dropout_of_pytorch_is_used_where_that_is_asked_for():
    q, k, v = (floats(*one) for one in PLAIN)
    for kwargs in ({}, {"is_causal": True}, {"scale": 0.2}):
        graph, values = _graph_of(ATTENTION, [q, k, v], {"dropout_p": 0.4, **kwargs})
        torch.manual_seed(3)
        (found,) = compute_part(refine(graph), "op", {})(values, Place(key=7, plain=True))
        torch.manual_seed(3)
        expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, **kwargs)
        assert torch.allclose(found, expected, rtol=1e-12)


def test_dropout_keeps_as_many_as_it_should():
    numbers = uniform(5, (100, 100), Box.whole((100, 100)), torch.device("cpu"))
    assert 0.48 < numbers.mean() < 0.52
    assert numbers.min() >= 0
    assert numbers.max() < 1


# ---- scalars and nothing ----


@pytest.mark.parametrize("kind", sorted({example.kind for example in EXAMPLES}))
def test_no_rule_fails_for_empty_tensors(kind):
    for example in (one for one in EXAMPLES if one.kind == kind):
        graph, _ = _graph_of(example.op, example.args, example.kwargs)
        for empty in range(3):
            tensors = {
                name: Tensor(
                    name=name,
                    shape=tuple(0 if i == empty else size for i, size in enumerate(tensor.shape)),
                    dtype=tensor.dtype,
                    role=tensor.role,
                )
                for name, tensor in graph.tensors.items()
            }
            case = rules.case_of(graph.ops[0], tensors)
            assert len(rules.signature_of(case).reads) == len(case.reads)


# ---- rules of users ----


@torch.library.custom_op("testlib::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale


@scaled.register_fake
def _(x, scale):
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[1], (gradient * ctx.saved_tensors[0]).flatten(0, -2).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("testlib::total", mutates_args=())
def total(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.sum(-1) if bias is None else x.sum(-1) + bias


@torch.library.custom_op("testlib::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 0.5, x.sum(-1)


@torch.library.custom_op("testlib::folded", mutates_args=())
def folded(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1, keepdim=True)


@pytest.fixture
def rule_for():
    """Registers rules, and takes them back afterwards."""
    before = dict(rules._RULES)
    yield rules.register_rule
    rules._RULES.clear()
    rules._RULES.update(before)


def test_a_custom_op_is_cut_by_a_rule_of_one_line(rule_for):
    with pytest.raises(RuleError, match="has no rule"):
        check_rule(scaled, floats(2, 3, 4), floats(4))
    rule_for("testlib::scaled", "* n, n -> * n")
    rule_for("testlib::halves", "b n^ -> b n^, b")
    assert check_rule(halves, floats(3, 4)) == ["b"]
    for op in (scaled, torch.ops.testlib.scaled, torch.ops.testlib.scaled.default):
        assert check_rule(op, floats(2, 3, 4), floats(4)) == ["d0", "d1", "n"]
    rule_for("testlib::total", "* n+, *? -> *")
    assert check_rule(total, floats(2, 3, 4), floats(3)) == ["d0", "d1", "n"]
    assert check_rule(total, floats(2, 3, 4)) == ["d0", "d1", "n"]


@pytest.mark.parametrize(
    ("op", "rule", "arguments", "reason"),
    [
        (scaled, "* n, n+ -> *", [(2, 3), (3,)], "does not fit the shapes"),
        (scaled, "b n^, n^ -> b n^", [(2, 3, 4), (4,)], "does not fit the shapes: b n\\^ against the shape"),
        (scaled, "* n -> * n", [(2, 3), (3,)], "does not fit 2 inputs and 1 outputs"),
        (scaled, "* n, m^ -> * n", [(4, 6), (6,)], "cannot be computed"),
        (total, "b n -> n b", [(3, 4)], "does not fit"),
        (total, "b n+, b -> b", [(4, 6), (4,)], "cut along n into 3 \\+ 3, output 0 differs by 0\\.[0-9]+"),
        (halves, "b n -> b n, b n^", [(3, 4)], "does not fit"),
        (halves, "b n^ -> b^ n^, b^ n", [(3, 4)], "does not fit"),
        (folded, "* n -> * n", [(3, 4)], "cut along n into 2 \\+ 2, does not make each element of output 0 once"),
    ],
)
def test_a_wrong_rule_is_found_out(rule_for, refused, op, rule, arguments, reason):
    rule_for(op._qualname, rule)
    sentence = refused(check_rule, op, *(floats(*shape) for shape in arguments), error=RuleError)
    assert re.search(reason, sentence), sentence


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("* n, n", "has no '->'"),
        ("* n, n = * n", "has no '->'"),
        ("b [n] -> b", "'\\[n\\]' in the rule .* is not a dim"),
        ("b 2 -> b", "'2' in the rule .* is not a dim"),
        ("b n? m -> b n m", "'n\\?' in the rule .* is not a dim"),
        ("*+ n -> n", "'\\*\\+' in the rule .* is not a dim"),
        ("b n+ -> b n", "n in the rule .* is summed and yet in an output"),
        ("b n -> b", "n in the rule .* is not in every output"),
        ("b n -> b n, b", "n in the rule .* is not in every output"),
        ("* * n -> * n", "has two \\* in one tensor"),
        ("* n -> n", "has a \\* that is not in every output"),
        ("* d0 -> * d0", "uses d0, d1"),
    ],
)
def test_bad_notation_is_refused_in_one_sentence(refused, text, reason):
    assert re.search(reason, refused(rules.register_rule, "testlib::bad", text, error=RuleError))


def test_a_rank_that_does_not_fit_is_said(refused):
    notation = parse("b n -> b n")
    assert "b n against the shape [2, 3, 4]" in refused(notation.signature, [(2, 3, 4)], [(2, 3, 4)], error=RuleError)
    notation = parse("* m n -> * m n")
    assert "* m n against the shape [4]" in refused(notation.signature, [(4,)], [(4,)], error=RuleError)
    assert "n is 3 and 4" in refused(parse("n, n -> n").signature, [(3,), (4,)], [(4,)], error=RuleError)


def test_what_is_not_an_op_is_refused(refused):
    assert "is not an op" in refused(check_rule, torch.relu, floats(3), error=RuleError)


def test_an_op_without_a_rule_is_told():
    with pytest.raises(RuleError, match="has no rule"):
        check_rule(aten.angle.default, floats(3, 4))
    assert rota.testing.check_rule is check_rule


@pytest.mark.parametrize("target", ["nope", "", "mylib::nope", "testlib::scaled::x", None, 3])
def test_a_rule_for_an_op_that_is_not_there_is_refused(target):
    with pytest.raises(RuleError, match="op"):
        rules.register_rule(target, "* -> *")


def test_a_rule_of_pytorchs_own_op_can_be_replaced(rule_for):
    rule_for("aten::angle", "* -> *")
    assert check_rule(aten.angle.default, floats(3, 4)) == ["d0", "d1"]
