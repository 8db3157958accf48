"""Races of the program (``program_*``) and of a library (``library_*``) with torch; all run in one process."""

import threading

import torch
import torch.nn.functional as F

import fakelib

N = 1 << 20


def data():
    x = torch.ones(N, device="cuda")
    torch.cuda.synchronize()
    return x


def streams(count=2):
    made = [torch.cuda.Stream() for _ in range(count)]
    torch.cuda.synchronize()
    return made


# --- races of a library


def library_forget_fork():
    fakelib.forget_fork(data())


def library_forget_join():
    fakelib.forget_join(data())


def library_nested():
    fakelib.nested(data())


def library_in_loop():
    x = data()
    for _ in range(3):
        fakelib.forget_fork(x)
        torch.cuda.synchronize()


def library_on_own_stream():
    x, (a, _) = data(), streams()
    with torch.cuda.stream(a):
        fakelib.forget_fork(x)


def library_object_call():
    fakelib.Layer()(data())


def library_operator():
    fakelib.Layer() @ data()


def library_context_manager():
    with fakelib.Layer():
        pass


def library_property():
    fakelib.Layer().value


def library_streams_of_caller():
    fakelib.on_streams(data(), streams())


def library_callback():
    x, y = data(), data()
    fakelib.with_callback(x, lambda: fakelib.scale(y))


def library_generator():
    x = data()
    for _ in fakelib.batches(x, 2):
        torch.cuda.synchronize()


def library_thread():
    x = data()
    thread = threading.Thread(target=lambda: fakelib.forget_fork(x))
    thread.start(), thread.join()


def library_comprehension():
    x = data()
    [fakelib.forget_fork(x) for _ in range(2)]


def library_lambda():
    x = data()
    (lambda: fakelib.forget_fork(x))()


# --- races of the program


def program_autograd_function_of_library():
    # Not attributed: autograd's thread runs Python functions of the library, and none of the program.
    x = data().requires_grad_()
    y = fakelib.Racy.apply(x).sum()
    torch.cuda.synchronize()
    y.backward()


def program_direct():
    x, (a, b) = data(), streams()
    with torch.cuda.stream(a):
        x.add_(1)
    with torch.cuda.stream(b):
        x.mul_(2)


def program_same_line():
    x = data()
    for stream in streams():
        with torch.cuda.stream(stream):
            fakelib.scale(x)


def program_two_calls():
    x, (a, b) = data(), streams()
    fakelib.start(x, a)
    fakelib.start(x, b)


def program_one_line_two_calls():
    x, (a, b) = data(), streams()
    fakelib.start(x, a), fakelib.start(x, b)


def program_comprehension():
    x = data()
    [fakelib.start(x, stream) for stream in streams()]


def program_helper_in_map():
    x = data()
    list(map(lambda stream: fakelib.start(x, stream), streams()))


def program_while_loop():
    x, made = data(), streams()
    while made:
        fakelib.start(x, made.pop())


def program_recursive(x=None, made=None):
    x, made = (data(), streams()) if x is None else (x, made)
    if made:
        fakelib.start(x, made[0])
        program_recursive(x, made[1:])


def program_missing_wait_for_library_stream():
    x = data()
    fakelib.start_on_side(x)
    fakelib.scale(x)


def program_stream_made_by_library():
    x, a, b = data(), fakelib.make_stream(), fakelib.make_stream()
    fakelib.start(x, a)
    fakelib.start(x, b)


def program_functional():
    x, (a, b) = data(), streams()
    with torch.cuda.stream(a):
        F.relu(x, inplace=True)
    with torch.cuda.stream(b):
        F.relu(x, inplace=True)


def program_backward_against_optimizer():
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(64, 1024, device="cuda")
    model(x).sum().backward()
    (side, _) = streams()
    loss = model(x).sum()
    torch.cuda.synchronize()
    loss.backward()
    with torch.cuda.stream(side):
        optimizer.step()


def program_callback_in_library():
    x = data()
    (side, _) = streams()

    def callback():
        with torch.cuda.stream(side):
            fakelib.scale(x)

    fakelib.with_callback(x, callback)


def program_graph():
    x, out, (side, other) = data(), torch.zeros(N, device="cuda"), streams()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(x * 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.replay()
    with torch.cuda.stream(other):
        fakelib.scale(out)


def program_in_ranges():
    x, (a, b) = data(), streams()
    for step in range(8):
        with torch.cuda.nvtx.range(f"step {step}"):
            with torch.cuda.stream(a), torch.cuda.nvtx.range("prefetch"):
                x.add_(1)
            if step < 7:
                torch.cuda.synchronize()
            with torch.cuda.stream(b), torch.cuda.nvtx.range("compute"):
                x.mul_(2)
        torch.cuda.synchronize()


def program_threads():
    x = data()
    for stream in streams():
        thread = threading.Thread(target=lambda stream=stream: fakelib.start(x, stream))
        thread.start(), thread.join()


if __name__ == "__main__":
    for name, run in list(globals().items()):
        if name.startswith(("library_", "program_")):
            run()
            torch.cuda.synchronize()
