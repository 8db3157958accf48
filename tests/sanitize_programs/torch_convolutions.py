"""Train convolutions by cuDNN in half precision and channels-last; ``race`` does not wait for the copy of its input."""

import sys

import torch

from side_stream import train

torch.backends.cudnn.benchmark = True
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3, padding=1),
    torch.nn.BatchNorm2d(32),
    torch.nn.ReLU(),
    torch.nn.Conv2d(32, 64, 3, stride=2, groups=4),
    torch.nn.GroupNorm(8, 64),
    torch.nn.ConvTranspose2d(64, 16, 2, stride=2),
)
model = model.cuda().to(memory_format=torch.channels_last)
images = torch.randn(8, 3, 64, 64)


def loss(model, x):
    with torch.autocast("cuda", dtype=torch.float16):
        return model(x.to(memory_format=torch.channels_last)).float().square().mean()


train(model, images, race=sys.argv[1] == "race", loss=loss)
