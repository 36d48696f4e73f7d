"""Rules by operator: how the batch axis of an operator's outputs determines that of its inputs.

The losses have one entry per record. From there the recorded graph is walked backwards. An operator that never mixes
entries of different records passes the batch axis on to its inputs. An input without room for the records (a weight, a
bias, a position embedding) has a gradient that is a sum over them: SUMMED. Rules are facts about operators, not guesses
from shapes. An operator without a rule, or a use that its rule does not cover, raises UnsupportedOp.

To add an operator: a function with the signature `batch_axis.Rule`, and a line in RULES.
"""

from __future__ import annotations

from typing import Any

from . import layer_rules as layers
from . import shape_rules as shapes
from .batch_axis import InputAxis, OutputAxes, Rule, UnsupportedOp, operator, wanted

#: Entry by entry, with or without broadcasting.
ELEMENTWISE = """
    Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh Ceil Celu Clamp Clamp0 Clamp1
    ClampMax ClampMin Clone Conj Copysign Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 Floor
    Fmax Fmin Fmod Frac Gelu Hardshrink Hardsigmoid Hardswish Hardtanh Hypot LeakyRelu Lerp Lgamma Log Log10
    Log1P Log2 LogSigmoid Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mish Mul NanToNum NativeDropout
    Neg PreluKernel Pow Reciprocal Relu Remainder Round RreluWithNoise Rsqrt Rsub Sgn Sigmoid Sign Silu Sin Sinc
    Sinh Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Trunc Where Xlogy Zero
"""

_RULES: dict[Rule, str] = {
    shapes.elementwise: ELEMENTWISE,
    shapes.loss_by_entry: """
        MseLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss SmoothL1Loss SoftMarginLoss
    """,
    shapes.view: "View UnsafeView ReshapeAlias Squeeze Unsqueeze",
    shapes.restrided: "AsStrided",
    shapes.transpose: "T Transpose",
    shapes.permute: "Permute",
    shapes.reduction: "Sum Mean Amax Amin Max Min Logsumexp LinalgVectorNorm Norm Var Std Prod Median Nansum",
    shapes.along: """
        Softmax LogSoftmax SafeSoftmax Cumsum Logcumsumexp Cumprod Cummax Cummin Gather IndexSelect Flip Sort Topk Glu
        Cat Scatter ScatterAdd ScatterReduce IndexAdd IndexCopy IndexFill FftR2C FftC2C FftC2R
    """,
    shapes.last_axis: "Unfold ViewAsReal ViewAsComplex",
    shapes.first_axis: "Im2Col Col2Im ChannelShuffle GridSampler2D GridSampler3D AffineGridGenerator",
    shapes.leading(1): "ReflectionPad1D ReplicationPad1D UpsampleNearest1D UpsampleNearestExact1D UpsampleLinear1D",
    shapes.leading(2): """
        MaxPool2DWithIndices MkldnnMaxPool2D AvgPool2D AdaptiveAvgPool2D AdaptiveMaxPool2D FractionalMaxPool2D
        ReflectionPad2D ReplicationPad2D UpsampleNearest2D UpsampleNearestExact2D UpsampleBilinear2D
        UpsampleBilinear2DAa UpsampleBicubic2D UpsampleBicubic2DAa MaxUnpool2D Tril Triu
    """,
    shapes.leading(3): """
        MaxPool3DWithIndices AvgPool3D AdaptiveAvgPool3D AdaptiveMaxPool3D FractionalMaxPool3D ReflectionPad3D
        ReplicationPad3D UpsampleNearest3D UpsampleNearestExact3D UpsampleTrilinear3D MaxUnpool3D PixelShuffle
        PixelUnshuffle
    """,
    shapes.sliced: "Slice",
    shapes.rolled: "Roll",
    shapes.padded: "ConstantPadNd",
    shapes.select: "Select",
    shapes.split: "Split SplitWithSizes UnsafeSplit",
    shapes.unbind: "Unbind",
    shapes.stack: "Stack",
    shapes.repeat: "Repeat",
    shapes.index: "Index",
    layers.mm: "Mm",
    layers.mv: "Mv",
    layers.addmm: "Addmm",
    layers.bmm: "Bmm",
    layers.baddbmm: "Baddbmm",
    layers.linear: "Linear",
    layers.trilinear: "Trilinear",
    layers.convolution: "CudnnConvolution Convolution",
    layers.group_norm: "NativeGroupNorm",
    layers.layer_norm: "NativeLayerNorm FusedRmsNorm",
    layers.batch_norm: "NativeBatchNorm",
    layers.nll: "NllLoss NllLoss2D MultiMarginLoss MultilabelMarginLoss",
    layers.embedding: "Embedding",
    layers.bag: "EmbeddingBag",
    layers.attention: """
        ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention ScaledDotProductEfficientAttention
        ScaledDotProductCudnnAttention
    """,
    layers.recurrent: "MkldnnRnnLayer",
}

#: By the operator's name without "Backward" and its number: "Addmm" for AddmmBackward0.
RULES: dict[str, Rule] = {name: rule for rule, names in _RULES.items() for name in names.split()}


def propagate(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """One entry per input of this node, from the batch axes of its outputs. Raises UnsupportedOp."""
    rule, name = RULES.get(operator(node)), operator(node) or node.name()
    if rule is None:
        raise UnsupportedOp(f"{name} has no rule")
    try:
        inputs = rule(node, axes, records)
        return [axis if want else None for axis, want in zip(inputs, wanted(node), strict=True)]
    except UnsupportedOp as e:
        raise UnsupportedOp(str(e) or f"{name} is used in a way that its rule does not cover") from e
    except (AttributeError, ArithmeticError, IndexError, ValueError, TypeError, RuntimeError) as e:
        raise UnsupportedOp(f"{name} is used in a way that its rule does not cover") from e
