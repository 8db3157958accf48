"""Train an LSTM by cuDNN on a packed batch; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import train

model = torch.nn.LSTM(128, 128, batch_first=True).cuda()
lengths = torch.arange(40, 8, -2)
inputs = torch.randn(len(lengths), 40, 128)


def loss(model, x):
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return model(packed)[0].data.square().mean()


train(model, inputs, race=sys.argv[1] == "race", loss=loss)
