"""The models that ship with pt2qa: small, fixed, one pattern each."""

from __future__ import annotations

import operator
from functools import partial

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from pt2qa._conformance import nets
from pt2qa._conformance.model import ConformanceModel
from pt2qa._conformance.nets import Net, images, rows, sequences

_ALL = (
    # Convolutions with what follows them, in every spelling.
    ConformanceModel(
        "conv_bn_relu",
        "convolution, batch norm, ReLU",
        nets.conv(nn.ReLU(), norm=True),
        images,
        {
            "functional": nets.functional_conv(F.relu, norm=True),
            "nn.ReLU(inplace=True)": nets.conv(nn.ReLU(inplace=True), norm=True),
            "F.relu(inplace=True)": nets.conv(partial(F.relu, inplace=True), norm=True),
            "relu_": nets.conv(lambda x: x.relu_(), norm=True),
            "torch.relu": nets.conv(torch.relu, norm=True),
            "subclass": nets.conv(nn.ReLU(), norm=True, make=nets.Conv),
        },
    ),
    ConformanceModel(
        "conv_relu",
        "convolution, ReLU",
        nets.conv(nn.ReLU()),
        images,
        {"functional": nets.functional_conv(F.relu), "nn.ReLU(inplace=True)": nets.conv(nn.ReLU(inplace=True))},
    ),
    ConformanceModel(
        "conv_relu6",
        "convolution, ReLU6",
        nets.conv(nn.ReLU6()),
        images,
        {
            "F.relu6": nets.conv(F.relu6),
            "nn.ReLU6(inplace=True)": nets.conv(nn.ReLU6(inplace=True)),
            "nn.Hardtanh": nets.conv(nn.Hardtanh(0.0, 6.0)),
            "torch.clamp": nets.conv(lambda x: torch.clamp(x, 0.0, 6.0)),
        },
    ),
    ConformanceModel(
        "conv_bn",
        "convolution, batch norm",
        nets.conv(nn.Identity(), norm=True),
        images,
        {"functional": nets.functional_conv(nn.Identity(), norm=True)},
    ),
    ConformanceModel(
        "conv1d",
        "convolution over time, ReLU",
        lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU()),
        lambda: (torch.randn(2, 3, 16),),
    ),
    ConformanceModel(
        "depthwise", "one filter a channel", nets.between(lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8)), images
    ),
    ConformanceModel("grouped", "groups of channels", nets.between(lambda: nn.Conv2d(8, 4, 3, groups=2)), images),
    ConformanceModel(
        "dilated", "dilation and stride", nets.between(lambda: nn.Conv2d(8, 4, 3, dilation=2, stride=2)), images
    ),
    ConformanceModel(
        "conv_transpose",
        "transposed convolution: its channel axis is the second",
        nets.between(lambda: nn.ConvTranspose2d(8, 4, 2, stride=2)),
        images,
    ),
    # Linears, and activations whose range is known.
    ConformanceModel(
        "linear",
        "two linears",
        nets.linears(nn.Linear),
        rows,
        {"functional": nets.linears(nets.Functional), "subclass": nets.linears(nets.Linear)},
    ),
    ConformanceModel(
        "linear_relu",
        "linear, ReLU",
        nets.linear(nn.ReLU()),
        rows,
        {
            "functional": nets.linear(F.relu, nets.Functional),
            "nn.ReLU(inplace=True)": nets.linear(nn.ReLU(inplace=True)),
            "relu_": nets.linear(lambda x: x.relu_()),
        },
    ),
    ConformanceModel(
        "linear_3d",
        "a linear on a batch of sequences, without bias",
        lambda: nn.Linear(8, 6, bias=False),
        lambda: (torch.randn(2, 5, 8),),
    ),
    ConformanceModel(
        "sigmoid",
        "linear, sigmoid: the range is 0..1 whatever the data",
        nets.linear(nn.Sigmoid()),
        rows,
        {"torch.sigmoid": nets.linear(torch.sigmoid)},
    ),
    ConformanceModel("layer_norm", "linear, layer norm", lambda: nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)), rows),
    # Sums, products and concatenations.
    ConformanceModel(
        "residual_add",
        "a residual connection",
        nets.residual(operator.add),
        images,
        {
            "torch.add": nets.residual(torch.add),
            "+=": nets.residual(nets.add_in_place),
            "add_": nets.residual(lambda left, right: left.add_(right)),
        },
    ),
    ConformanceModel(
        "residual_add_relu",
        "a residual connection with a ReLU behind it",
        nets.residual(lambda left, right: torch.relu(left + right)),
        images,
        {"+= and relu_": nets.residual(lambda left, right: nets.add_in_place(left, right).relu_())},
    ),
    ConformanceModel("cat", "two values joined", nets.residual(nets.cat), images),
    ConformanceModel(
        "mul",
        "two values multiplied",
        nets.residual(operator.mul),
        images,
        {"mul_": nets.residual(lambda left, right: left.mul_(right))},
    ),
    ConformanceModel("add_self", "x + x: two uses, one edge", nets.both(operator.add), images),
    ConformanceModel("cat_self", "cat([x, x]): two uses, one edge", nets.both(nets.cat), images),
    ConformanceModel(
        "two_users",
        "a value before and after its ReLU",
        lambda: Net(nets.before_and_after_relu, conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU()),
        images,
    ),
    ConformanceModel("scalars", "a value times and plus a number", nets.both(lambda x, _: 0.5 * x + 1.0), images),
    # Modules and weights that are used more than once, and code that nothing uses.
    ConformanceModel(
        "shared_relu",
        "one ReLU module called twice",
        lambda: Net(
            lambda m, x: m.relu(m.second(m.relu(m.first(x)))),
            first=nn.Conv2d(3, 4, 1),
            second=nn.Conv2d(4, 4, 1),
            relu=nn.ReLU(),
        ),
        images,
    ),
    ConformanceModel(
        "shared_conv",
        "one convolution called twice",
        lambda: Net(lambda m, x: m.conv(torch.tanh(m.conv(x))), conv=nn.Conv2d(3, 3, 1)),
        images,
    ),
    ConformanceModel("tied_weights", "two linears with one weight", nets.tied_weights, rows),
    ConformanceModel(
        "dead_code",
        "an op that nothing reads",
        lambda: Net(nets.half_unused, used=nn.Linear(8, 4), unused=nn.Linear(8, 4)),
        rows,
    ),
    # Ops that move values without changing them, pools, and shapes that change from batch to batch.
    ConformanceModel(
        "transpose",
        "linears around a transpose",
        lambda: Net(lambda m, x: m.columns(m.rows(x).transpose(1, 2)), rows=nn.Linear(8, 6), columns=nn.Linear(5, 4)),
        lambda: (torch.randn(2, 5, 8),),
    ),
    ConformanceModel(
        "permute",
        "permute before and after a linear",
        lambda: Net(
            lambda m, x: m.fc(m.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
            conv=nn.Conv2d(3, 4, 1),
            fc=nn.Linear(4, 4),
        ),
        images,
    ),
    ConformanceModel(
        "reshape",
        "convolutions around a reshape",
        lambda: Net(
            lambda m, x: m.second(m.first(x).reshape(-1, 16, 4, 4)),
            first=nn.Conv2d(3, 4, 1),
            second=nn.Conv2d(16, 4, 1),
        ),
        images,
    ),
    ConformanceModel("max_pool", "convolution, max pool, flatten, linear", nets.pooled(nn.MaxPool2d(2), 64), images),
    ConformanceModel(
        "avg_pool",
        "convolution, adaptive average pool, flatten, linear",
        nets.pooled(nn.AdaptiveAvgPool2d(1), 4),
        images,
    ),
    ConformanceModel(
        "mean",
        "convolution, ReLU, mean, linear",
        lambda: Net(lambda m, x: m.fc(F.relu(m.conv(x)).mean((2, 3))), conv=nn.Conv2d(3, 4, 1), fc=nn.Linear(4, 5)),
        images,
    ),
    ConformanceModel(
        "dynamic_batch",
        "any number of samples",
        nets.pooled(nn.MaxPool2d(2), 64),
        images,
        dynamic_shapes=({0: Dim("batch", max=64)},),
    ),
    # Attention and recurrent ops.
    ConformanceModel("attention", "attention by matmul and softmax", nets.attention(nets.by_matmul), sequences),
    ConformanceModel(
        "scaled_dot_product",
        "attention as one op",
        nets.attention(lambda m, x: F.scaled_dot_product_attention(m.query(x), m.key(x), m.value(x))),
        sequences,
    ),
    ConformanceModel(
        "multihead_attention",
        "nn.MultiheadAttention",
        lambda: Net(
            lambda m, x: m.attention(x, x, x, need_weights=False)[0],
            attention=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        sequences,
    ),
    ConformanceModel("lstm", "an LSTM, which is one op", nets.recurrent, sequences),
    ConformanceModel(
        "lstm_decomposed",
        "an LSTM taken apart",
        nets.recurrent,
        lambda: (torch.randn(2, 2, 8),),  # short, because an LSTM is unrolled step by step
        decompose=("lstm",),
    ),
    # Values that are not activations: integers, booleans, constants, parameters outside convolutions and linears.
    ConformanceModel("embedding", "words looked up", nets.Embedded, lambda: (torch.randint(0, 10, (2, 5)),)),
    ConformanceModel(
        "integers", "arithmetic of integers", nets.Indexed, lambda: (torch.randn(8, 8), torch.randint(0, 3, (3,)))
    ),
    ConformanceModel(
        "mask",
        "a boolean mask",
        lambda: Net(lambda m, x: torch.where(x > 0, m.fc(x), torch.zeros_like(x)), fc=nn.Linear(8, 8)),
        rows,
    ),
    ConformanceModel(
        "buffer",
        "buffers multiplied and added",
        lambda: Net(
            lambda m, x: m.fc(x) * m.scale + m.shift,
            fc=nn.Linear(8, 6),
            scale=nn.Buffer(torch.rand(6) + 0.5),
            shift=nn.Buffer(torch.randn(6)),
        ),
        rows,
    ),
    ConformanceModel(
        "literal",
        "a constant that forward makes",
        lambda: Net(lambda m, x: m.fc(x) + torch.tensor([0.5, -0.5, 1.0, -1.0]), fc=nn.Linear(8, 4)),
        rows,
    ),
    ConformanceModel(
        "parameter",
        "a parameter multiplied",
        lambda: Net(lambda m, x: m.fc(x) * m.gain, fc=nn.Linear(8, 6), gain=nn.Parameter(torch.rand(6) + 0.5)),
        rows,
    ),
)

MODELS: dict[str, ConformanceModel] = {model.name: model for model in _ALL}
"""By name, in run order."""
