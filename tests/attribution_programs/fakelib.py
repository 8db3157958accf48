"""A library with and without races inside, to be installed in a directory site-packages. It uses torch."""

import torch

_streams: list[torch.cuda.Stream] = []


def _side() -> torch.cuda.Stream:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


def scale(x: torch.Tensor) -> torch.Tensor:
    """Work on the current stream only."""
    return x.mul_(2)


def forget_fork(x: torch.Tensor) -> torch.Tensor:
    """WRONG: the side stream reads what the current stream writes, without a wait."""
    x.add_(1)
    with torch.cuda.stream(_side()):
        y = x * 2
    torch.cuda.current_stream().wait_stream(_side())
    return y


def forget_join(x: torch.Tensor) -> torch.Tensor:
    """WRONG: the current stream writes what the side stream reads, without a wait."""
    side = _side()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    return y


def nested(x: torch.Tensor) -> torch.Tensor:
    """Race in an inner function of the library."""
    return forget_fork(scale(x))


def on_streams(x: torch.Tensor, streams: list[torch.cuda.Stream]) -> None:
    """WRONG: two streams of the caller write the same tensor in one call."""
    for stream in streams:
        with torch.cuda.stream(stream):
            x.add_(1)


def with_callback(x: torch.Tensor, callback) -> torch.Tensor:
    """Race around a function of the program."""
    x.add_(1)
    callback()
    with torch.cuda.stream(_side()):
        y = x * 2
    torch.cuda.current_stream().wait_stream(_side())
    return y


def batches(x: torch.Tensor, count: int):
    """A generator with a race in each step."""
    for _ in range(count):
        yield forget_fork(x)


def start(x: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Begin work on a stream of the caller, who has to wait for it."""
    with torch.cuda.stream(stream):
        x.add_(1)


def start_on_side(x: torch.Tensor) -> torch.cuda.Stream:
    """Begin work on a stream of the library and return the stream: the caller has to wait for it."""
    side = _side()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    return side


def make_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


class Layer:
    """An object with calls, operators and methods that race."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return forget_fork(x)

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return forget_fork(x)

    def __enter__(self) -> "Layer":
        forget_fork(torch.ones(1 << 20, device="cuda"))
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def value(self) -> torch.Tensor:
        return forget_fork(torch.ones(1 << 20, device="cuda"))


class Racy(torch.autograd.Function):
    """An autograd function whose backward races inside."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        forget_fork(gradient)
        return gradient * 2
