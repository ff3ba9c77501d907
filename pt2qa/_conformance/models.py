"""The models that ship with pt2qa: small, fixed, one pattern each."""

from __future__ import annotations

import operator
from functools import partial

import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from pt2qa._conformance import nets
from pt2qa._conformance.nets import ConformanceModel as Model
from pt2qa._conformance.nets import Net, drawn, images, net, rows, sequences

_CONV = (nn.Conv2d, 3, 4, 1)

_ALL = (
    # Convolutions with what follows them, in every spelling.
    Model(
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
    Model(
        "conv_relu",
        "convolution, ReLU",
        nets.conv(nn.ReLU()),
        images,
        {"functional": nets.functional_conv(F.relu), "nn.ReLU(inplace=True)": nets.conv(nn.ReLU(inplace=True))},
    ),
    Model(
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
    Model(
        "conv_bn",
        "convolution, batch norm",
        nets.conv(nn.Identity(), norm=True),
        images,
        {"functional": nets.functional_conv(nn.Identity(), norm=True)},
    ),
    Model("conv1d", "convolution over time, ReLU", nets.chain(partial(nn.Conv1d, 3, 8, 3), nn.ReLU), drawn(2, 3, 16)),
    Model("depthwise", "one filter a channel", nets.between(nn.Conv2d, 8, 8, 3, padding=1, groups=8), images),
    Model("grouped", "groups of channels", nets.between(nn.Conv2d, 8, 4, 3, groups=2), images),
    Model("dilated", "dilation and stride", nets.between(nn.Conv2d, 8, 4, 3, dilation=2, stride=2), images),
    Model(
        "conv_transpose",
        "transposed convolution: its channel axis is the second",
        nets.between(nn.ConvTranspose2d, 8, 4, 2, stride=2),
        images,
    ),
    # Linears, and activations whose range is known.
    Model(
        "linear",
        "two linears",
        nets.linears(nn.Linear),
        rows,
        {"functional": nets.linears(nets.Functional), "subclass": nets.linears(nets.Linear)},
    ),
    Model(
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
    Model(
        "linear_3d",
        "a linear on a batch of sequences, without bias",
        partial(nn.Linear, 8, 6, bias=False),
        drawn(2, 5, 8),
    ),
    Model(
        "sigmoid",
        "linear, sigmoid: the range is 0..1 whatever the data",
        nets.linear(nn.Sigmoid()),
        rows,
        {"torch.sigmoid": nets.linear(torch.sigmoid)},
    ),
    Model("layer_norm", "linear, layer norm", nets.chain(partial(nn.Linear, 8, 6), partial(nn.LayerNorm, 6)), rows),
    # Sums, products and concatenations.
    Model(
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
    Model(
        "residual_add_relu",
        "a residual connection with a ReLU behind it",
        nets.residual(lambda left, right: torch.relu(left + right)),
        images,
        {"+= and relu_": nets.residual(lambda left, right: nets.add_in_place(left, right).relu_())},
    ),
    Model("cat", "two values joined", nets.residual(nets.cat), images),
    Model(
        "mul",
        "two values multiplied",
        nets.residual(operator.mul),
        images,
        {"mul_": nets.residual(lambda left, right: left.mul_(right))},
    ),
    Model("add_self", "x + x: two uses, one edge", nets.both(operator.add), images),
    Model("cat_self", "cat([x, x]): two uses, one edge", nets.both(nets.cat), images),
    Model("two_users", "a value before and after its ReLU", nets.before_and_after_relu, images),
    Model("scalars", "a value times and plus a number", nets.both(lambda x, _: 0.5 * x + 1.0), images),
    # Modules and weights that are used more than once, and code that nothing uses.
    Model(
        "shared_relu",
        "one ReLU module called twice",
        net(
            lambda m, x: m.relu(m.second(m.relu(m.first(x)))), first=_CONV, second=(nn.Conv2d, 4, 4, 1), relu=(nn.ReLU,)
        ),
        images,
    ),
    Model(
        "shared_conv",
        "one convolution called twice",
        net(lambda m, x: m.conv(torch.tanh(m.conv(x))), conv=(nn.Conv2d, 3, 3, 1)),
        images,
    ),
    Model("tied_weights", "two linears with one weight", nets.tied_weights, rows),
    Model("dead_code", "an op that nothing reads", nets.half_unused, rows),
    # Ops that move values without changing them, pools, and shapes that change from batch to batch.
    Model(
        "transpose",
        "linears around a transpose",
        net(lambda m, x: m.columns(m.rows(x).transpose(1, 2)), rows=(nn.Linear, 8, 6), columns=(nn.Linear, 5, 4)),
        drawn(2, 5, 8),
    ),
    Model(
        "permute",
        "permute before and after a linear",
        net(lambda m, x: m.fc(m.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2), conv=_CONV, fc=(nn.Linear, 4, 4)),
        images,
    ),
    Model(
        "reshape",
        "convolutions around a reshape",
        net(lambda m, x: m.second(m.first(x).reshape(-1, 16, 4, 4)), first=_CONV, second=(nn.Conv2d, 16, 4, 1)),
        images,
    ),
    Model("max_pool", "convolution, max pool, flatten, linear", nets.pooled(nn.MaxPool2d(2), 64), images),
    Model(
        "avg_pool",
        "convolution, adaptive average pool, flatten, linear",
        nets.pooled(nn.AdaptiveAvgPool2d(1), 4),
        images,
    ),
    Model(
        "mean",
        "convolution, ReLU, mean, linear",
        net(lambda m, x: m.fc(F.relu(m.conv(x)).mean((2, 3))), conv=_CONV, fc=(nn.Linear, 4, 5)),
        images,
    ),
    Model(
        "dynamic_batch",
        "any number of samples",
        nets.pooled(nn.MaxPool2d(2), 64),
        images,
        dynamic_shapes=({0: Dim("batch", max=64)},),
    ),
    # Attention and recurrent ops.
    Model("attention", "attention by matmul and softmax", nets.attention(nets.by_matmul), sequences),
    Model(
        "scaled_dot_product",
        "attention as one op",
        nets.attention(lambda m, x: F.scaled_dot_product_attention(m.query(x), m.key(x), m.value(x))),
        sequences,
    ),
    Model(
        "multihead_attention",
        "nn.MultiheadAttention",
        net(
            lambda m, x: m.attention(x, x, x, need_weights=False)[0],
            attention=(partial(nn.MultiheadAttention, batch_first=True), 8, 2),
        ),
        sequences,
    ),
    Model("lstm", "an LSTM, which is one op", nets.recurrent, sequences),
    # Short, because an LSTM is unrolled step by step.
    Model("lstm_decomposed", "an LSTM taken apart", nets.recurrent, drawn(2, 2, 8), decompose=("lstm",)),
    # Values that are not activations: integers, booleans, constants, parameters outside convolutions and linears.
    Model("embedding", "words looked up", nets.Embedded, lambda: (torch.randint(0, 10, (2, 5)),)),
    Model("integers", "arithmetic of integers", nets.Indexed, lambda: (torch.randn(8, 8), torch.randint(0, 3, (3,)))),
    Model(
        "mask",
        "a boolean mask",
        net(lambda m, x: torch.where(x > 0, m.fc(x), torch.zeros_like(x)), fc=(nn.Linear, 8, 8)),
        rows,
    ),
    Model(
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
    Model(
        "literal",
        "a constant that forward makes",
        net(lambda m, x: m.fc(x) + torch.tensor([0.5, -0.5, 1.0, -1.0]), fc=(nn.Linear, 8, 4)),
        rows,
    ),
    Model(
        "parameter",
        "a parameter multiplied",
        lambda: Net(lambda m, x: m.fc(x) * m.gain, fc=nn.Linear(8, 6), gain=nn.Parameter(torch.rand(6) + 0.5)),
        rows,
    ),
)

MODELS: dict[str, Model] = {model.name: model for model in _ALL}
"""By name, in run order."""
