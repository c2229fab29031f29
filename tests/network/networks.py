"""Small networks of many architectures, each with the group of its symmetries worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A network, and what is to be found: the sizes of permutations and sign flips, in the order of sites."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    permutations: tuple[int, ...] = ()
    flips: tuple[int, ...] = ()
    missed: str = ""  # symmetries that it has, and that are knowingly not found


CASES: list[Case] = []


def case(
    shape: tuple[int, ...] | Inputs,
    permutations: tuple[int, ...] = (),
    flips: tuple[int, ...] = (),
    missed: str = "",
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Enter a network into the table; its input is normal of the given shape."""
    inputs = shape if callable(shape) else lambda: (torch.randn(shape),)

    def enter(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        CASES.append(Case(make.__name__, make, inputs, permutations, flips, missed))
        return make

    return enter


class Net(nn.Module):
    """A network from its parts and a function of them."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(self, *args)


def buffer(net: nn.Module, name: str, value: Tensor) -> nn.Module:
    net.register_buffer(name, value)
    return net


# Linear layers ----------------------------------------------------------------------------------------------


@case((5, 8), permutations=(6, 5, 4), flips=(6,))
def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2))
    )


@case((5, 8), permutations=(6, 5), flips=(6, 5))
def linear_network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 2))


# The stream is linear, so its signs flip; its units are the same everywhere.
@case((5, 8), permutations=(6, 4), flips=(6,))
def residual_mlp() -> nn.Module:
    return Net(
        lambda s, x: s.out((h := s.embed(x)) + s.down(F.relu(s.up(h)))),
        embed=nn.Linear(8, 6),
        up=nn.Linear(6, 4),
        down=nn.Linear(4, 6),
        out=nn.Linear(6, 2),
    )


# What is centred over units has no signs to flip, but its scale, its shift and the outgoing weights have.
@case((5, 8), permutations=(6,), flips=(6,))
def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2))


@case((5, 8), permutations=(6,))
def layer_norm_gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))


@case((5, 8), permutations=(6,), flips=(6,))
def rms_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 2))


# What goes into the even cosine flips on its own.
@case((5, 8), permutations=(6,), flips=(6, 6))
def softsign_and_multiplicative() -> nn.Module:
    return Net(
        lambda s, x: s.out(s.a(x).cos() * F.softsign(s.b(x)) - F.hardtanh(s.b(x), -0.5, 0.5)),
        a=nn.Linear(8, 6),
        b=nn.Linear(8, 6),
        out=nn.Linear(6, 2),
    )


@case((5, 8), permutations=(6,))
def gated_linear_unit() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.GLU(), nn.Linear(6, 2))


@case((5, 8), permutations=(6,), flips=(6,))
def bare_parameter() -> nn.Module:
    return Net(
        lambda s, x: s.out(torch.tanh(s.hidden(x)) * s.scale + s.shift),
        hidden=nn.Linear(8, 6),
        scale=nn.Parameter(torch.randn(6)),
        shift=nn.Parameter(torch.randn(6)),
        out=nn.Linear(6, 2),
    )


@case((5, 8), permutations=(8,), flips=())
def layer_used_twice() -> nn.Module:
    return Net(
        lambda s, x: s.out(F.relu(s.hidden(F.relu(s.hidden(s.embed(x)))))),
        embed=nn.Linear(8, 8),
        hidden=nn.Linear(8, 8),
        out=nn.Linear(8, 2),
    )


@case((5, 8), permutations=(4,), flips=(4,))
def tied_autoencoder() -> nn.Module:
    return Net(
        lambda s, x: s.decode(torch.tanh(F.linear(x, s.decode.weight.T, s.bias))),
        decode=nn.Linear(4, 8),
        bias=nn.Parameter(torch.randn(4)),
    )


@case(lambda: (torch.arange(10).view(2, 5),), permutations=(6, 12), flips=(6,))
def tied_embedding() -> nn.Module:
    """The first name of the shared weight has no users in the graph."""
    parts: Any = Net(
        lambda s, i: s.out(s.embed(i) + s.down(F.gelu(s.up(s.embed(i))))),
        embed=nn.Embedding(10, 6),
        up=nn.Linear(6, 12),
        down=nn.Linear(12, 6),
        out=nn.Linear(6, 10, bias=False),
    )
    parts.out.weight = parts.embed.weight
    return parts


@case(lambda: (torch.randn(5, 8), torch.randn(5, 8)), permutations=(6, 4), flips=(4,))
def two_towers() -> nn.Module:
    def score(s: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = (s.project(F.relu(s.shared(z))) for z in (x, y))
        return (a * b).sum(-1)

    return Net(score, shared=nn.Linear(8, 6), project=nn.Linear(6, 4))


@case(
    (5, 8),
    permutations=(3,),
    flips=(3,),
    missed="parts of one size move alike, and the part of 5 does not move",
)
def slices_and_concatenation() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.hidden(x))
        return s.out(torch.cat([h[:, :3], s.other(h[:, 3:])], dim=1)) + s.last(torch.relu(s.odd(x))[:, 1:5])

    return Net(
        forward,
        hidden=nn.Linear(8, 6),
        other=nn.Linear(3, 3),
        out=nn.Linear(6, 2),
        odd=nn.Linear(8, 5),
        last=nn.Linear(4, 2),
    )


# Order matters ----------------------------------------------------------------------------------------------


@case((5, 8))
def cumulative_sum() -> nn.Module:
    return Net(lambda s, x: s.out(s.hidden(x).tanh().cumsum(-1)), hidden=nn.Linear(8, 6), out=nn.Linear(6, 2))


@case((5, 8))
def position_weighted_sum() -> nn.Module:
    return Net(lambda s, x: (s.hidden(x).relu() * torch.arange(6.0)).sum(-1), hidden=nn.Linear(8, 6))


@case((5, 8))
def buffer_multiplied_in() -> nn.Module:
    net = Net(lambda s, x: s.out(s.hidden(x).relu() * s.mask), hidden=nn.Linear(8, 6), out=nn.Linear(6, 2))
    return buffer(net, "mask", torch.ones(6))


# Signs don't know of order: those may flip where units can't be swapped.
@case((5, 8), flips=(6,))
def buffer_multiplied_into_odd_units() -> nn.Module:
    net = Net(lambda s, x: s.out(s.hidden(x).tanh() * s.mask), hidden=nn.Linear(8, 6), out=nn.Linear(6, 2))
    return buffer(net, "mask", torch.ones(6))


@case((5, 8))
def sorted_units() -> nn.Module:
    return Net(lambda s, x: s.out(s.hidden(x).sort(-1).values), hidden=nn.Linear(8, 6), out=nn.Linear(6, 2))


# Convolutions -----------------------------------------------------------------------------------------------


@case((2, 3, 6, 6), permutations=(4,), flips=(4,))
def conv_batch_norm() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        )
    )


@case((2, 3, 6, 6), permutations=(4,), flips=(4,))
def conv_flatten_linear() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))


@case((2, 3, 6, 6), permutations=(4, 5))
def max_pool() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Tanh(), nn.Conv2d(4, 5, 3)),
        *(nn.ReLU(), nn.Flatten(), nn.Linear(5, 2)),
    )


@case(
    (2, 3, 6, 6),
    permutations=(4, 2),
    flips=(4, 2),
    missed="signs after the depthwise convolution as well as before it",
)
def depthwise() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4), nn.Tanh()),
        *(nn.Conv2d(4, 2, 1), nn.Flatten(), nn.Linear(32, 2)),
    )


@case((2, 3, 6), permutations=(2, 3, 5), missed="other permutations in each group")
def grouped_conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 6, 1), nn.ReLU(), nn.Conv1d(6, 10, 3, groups=2), nn.ReLU(), nn.Conv1d(10, 2, 1)
    )


@case((2, 3, 6), permutations=(2, 3), flips=(2,), missed="other permutations in each group")
def group_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv1d(6, 2, 1))


@case((2, 3, 6), permutations=(4,), flips=(4,))
def instance_norm() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.ReLU(), nn.Conv1d(4, 2, 1))


@case((2, 3, 5), permutations=(4, 5))
def conv_transpose() -> nn.Module:
    return nn.Sequential(
        *(nn.ConvTranspose1d(3, 4, 3), nn.ReLU(), nn.ConvTranspose1d(4, 5, 2, stride=2), nn.ReLU()),
        nn.Conv1d(5, 2, 1),
    )


@case((2, 2, 4, 4, 4), permutations=(3,))
def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 3, 3), nn.BatchNorm3d(3, affine=False), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)
    )


class BasicBlock(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


# A group a stage for the stream, one a block for its inside; signs before each batch norm.
@case((2, 3, 8, 8), permutations=(4, 4, 4, 6, 6, 6), flips=(4, 4, 4, 4, 4, 6, 6, 6, 6, 6))
def resnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(BasicBlock(4, 4, 1), BasicBlock(4, 4, 1), BasicBlock(4, 6, 2), BasicBlock(6, 6, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)),
    )


@case((2, 2, 8), permutations=(4, 6, 5), missed="skip and upsampled channels apart")
def unet() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        skip = F.relu(s.down(x))
        low = F.relu(s.bottom(F.max_pool1d(skip, 2)))
        return s.out(F.relu(s.up(torch.cat([skip, F.interpolate(s.mix(low), scale_factor=2)], 1))))

    return Net(
        forward,
        down=nn.Conv1d(2, 4, 3, padding=1),
        bottom=nn.Conv1d(4, 6, 3, padding=1),
        mix=nn.Conv1d(6, 4, 1),
        up=nn.Conv1d(8, 5, 3, padding=1),
        out=nn.Conv1d(5, 2, 1),
    )


# Sequences --------------------------------------------------------------------------------------------------


@case(lambda: (torch.randint(10, (5, 3)),), permutations=(4, 6), flips=(4,))
def embedding_classifier() -> nn.Module:
    return Net(
        lambda s, x: s.out(F.relu(s.hidden(s.embed(x).mean(1)))),
        embed=nn.Embedding(10, 4),
        hidden=nn.Linear(4, 6),
        out=nn.Linear(6, 2),
    )


def recurrent(cell: nn.RNNBase) -> nn.Module:
    return Net(lambda s, x: s.out(s.cell(x)[0][:, -1]), cell=cell, out=nn.Linear(5, 2))


@case((4, 3, 3), permutations=(5,))
def lstm() -> nn.Module:
    return recurrent(nn.LSTM(3, 5, batch_first=True))


@case((4, 3, 3), permutations=(5, 5))
def two_layer_gru() -> nn.Module:
    return recurrent(nn.GRU(3, 5, num_layers=2, dropout=0.1, batch_first=True))


@case((4, 3, 3), permutations=(5,), flips=(5,))
def tanh_rnn() -> nn.Module:
    return recurrent(nn.RNN(3, 5, batch_first=True))


# Heads and their inner dimensions move in all of queries, keys and values, which are one packed parameter.
@case(
    (2, 3, 4), permutations=(8, 2, 4), flips=(8, 2, 4), missed="inner dimensions head by head; values apart"
)
def multi_head_attention() -> nn.Module:
    return Net(
        lambda s, x: s.attention((h := s.embed(x)), h, h)[0],
        embed=nn.Linear(4, 8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    )


@case((2, 3, 8), permutations=(2, 4, 16), flips=(2, 4), missed="inner dimensions head by head; values apart")
def transformer_encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


class Attention(nn.Module):
    """Attention with weights of their own, as written out in many vision transformers."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, heads * inner) for _ in range(3))
        self.out = nn.Linear(heads * inner, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Patches(nn.Module):
    """A vision transformer of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.position = nn.Parameter(torch.randn(1, 5, 6))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(6) for _ in range(3))
        self.attention = Attention(6, 2, 3)
        self.up, self.down, self.head = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.position
        h = h + self.attention(self.norm1(h))
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.head(self.norm3(h)[:, 0])


@case(
    (2, 3, 8, 8),
    permutations=(6, 2, 3, 3, 10),
    flips=(6, 6, 6, 2, 2, 3, 3),
    missed="inner dimensions by head",
)
def vision_transformer() -> nn.Module:
    return Patches()


# Precision, masks and scalars -------------------------------------------------------------------------------


# Rounding is odd and keeps the order; what a network computes is then verified without it.
@case((5, 8), permutations=(6,), flips=(6,))
def casts() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.hidden(x)).to("cpu", torch.float16).double()
        return s.out((3 * h).long().type_as(h) + h.to(s.out.weight))

    return Net(forward, hidden=nn.Linear(8, 6), out=nn.Linear(6, 2))


@case((5, 8), permutations=(6,))
def scalars_fill_and_compare() -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.hidden(x)
        steps = torch.where(h > 0.1, torch.tensor(1.0), torch.tensor(-2.0))
        return s.out((1 - h).masked_fill(h < 0, -1.0) + steps * torch.full((), 2.0))

    return Net(forward, hidden=nn.Linear(8, 6), out=nn.Linear(6, 2))


class Bert(nn.Module):
    """Attention written out, with the mask of the tokens added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 6), nn.Embedding(8, 6)
        self.query, self.key, self.value, self.out = (nn.Linear(6, 6) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        q, k, v = (
            part(h).unflatten(-1, (2, 3)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        missing = 1.0 - attention_mask[:, None, None, :].to(h.dtype)
        scores = q @ k.transpose(-1, -2) + missing * torch.finfo(h.dtype).min
        mixed = scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
        h = self.norm(h + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.head(h[:, 0])


@case(
    lambda: (torch.randint(11, (2, 4)), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])),
    permutations=(6, 2, 3, 3),
    flips=(6, 2, 2, 3, 3),
    missed="inner dimensions by head",
)
def bert_with_attention_mask() -> nn.Module:
    return Bert()


@case(
    (2, 4, 4), permutations=(6, 2, 3), flips=(6, 2, 3), missed="inner dimensions head by head; values apart"
)
def causal_attention() -> nn.Module:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.packed, self.out = nn.Linear(4, 6), nn.Linear(6, 18), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.packed(self.embed(x)).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind(0)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return self.out(mixed.transpose(1, 2).flatten(2))

    return Causal()


@case((2, 4, 8), permutations=(2, 4, 10), flips=(2, 4), missed="as transformer_encoder_layer")
def encoder_layer_with_boolean_masks() -> nn.Module:
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    return Net(
        lambda s, x: s.layer(x, src_mask=causal, src_key_padding_mask=padding),
        layer=nn.TransformerEncoderLayer(8, 2, 10, batch_first=True),
    )
