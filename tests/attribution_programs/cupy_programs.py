"""Races of the program (``program_*``) and of a library (``library_*``) with CuPy; all run in one process."""

import cupy

import fakecupy

N = 1 << 20


def data():
    x = cupy.ones(N, "f4")
    cupy.cuda.Device().synchronize()
    return x


def streams():
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]


def library_forget_fork():
    fakecupy.forget_fork(data())


def library_copy_and_fill():
    fakecupy.copy_and_fill(data())


def library_two_streams():
    x, two = data(), fakecupy.TwoStreams()
    two.step(x)
    cupy.cuda.Device().synchronize()
    two.step(x)
    two.finish(x)


def program_direct():
    x, (a, b) = data(), streams()
    with a:
        cupy.add(x, 1, out=x)
    with b:
        cupy.add(x, 1, out=x)


def program_two_calls():
    x, made = data(), streams()
    for stream in made:
        with stream:
            fakecupy.scale(x)


def program_one_line():
    x, (a, b) = data(), streams()
    a.use(), fakecupy.scale(x), b.use(), fakecupy.scale(x), cupy.cuda.Stream.null.use()


if __name__ == "__main__":
    for name, run in list(globals().items()):
        if name.startswith(("library_", "program_")):
            run()
            cupy.cuda.Device().synchronize()
