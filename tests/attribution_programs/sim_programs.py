"""Races of the program (``program_*``) and of a library (``library_*``) on a simulated device, in one process."""

import asyncio
import threading
from functools import partial, reduce

from cudakit.gpu.open import open_gpu
from fakesim import SIZE, Library

gpu = open_gpu("sim")
library = Library(gpu)


def memory():
    gpu.sync()
    return gpu.malloc(2 * SIZE)


def streams():
    return gpu.stream(), gpu.stream()


# --- races of a library


def library_forget_fork():
    library.forget_fork(memory(), gpu.stream())


def library_forget_join():
    library.forget_join(memory(), gpu.stream())


def library_nested():
    library.nested(memory(), gpu.stream())


def library_in_loop_of_program():
    for _ in range(3):
        library.forget_fork(memory(), gpu.stream())


def library_streams_of_caller():
    library.in_loop(memory(), streams())


def library_around_callback():
    block = memory()
    library.with_callback(block, gpu.stream(), lambda: library.scale(block + SIZE, gpu.stream()))


def library_generator():
    for _ in library.batches(memory(), gpu.stream(), 2):
        gpu.sync()


def library_generator_in_list():
    list(library.batches(memory(), gpu.stream(), 1))


def library_object_call():
    library(memory(), gpu.stream())


def library_operator():
    library @ (memory(), gpu.stream())


def library_subscript():
    library[memory(), gpu.stream()]


def library_partial():
    partial(library.forget_fork, memory())(gpu.stream())


def library_thread():
    block, stream = memory(), gpu.stream()
    thread = threading.Thread(target=lambda: library.forget_fork(block, stream))
    thread.start(), thread.join()


def library_awaited():
    async def run():
        await library.asynchronous(memory(), gpu.stream())

    asyncio.run(run())


def library_streams_kept_inside():
    block = memory()
    library.use_workers(block, gpu.stream())
    library.work_on(0, block)
    library.work_on(1, block)


# --- races of the program


def program_direct():
    block, (first, second) = memory(), streams()
    gpu.fill(block, 1, SIZE, first)
    gpu.fill(block, 2, SIZE, second)


def program_same_line():
    block = memory()
    for stream in streams():
        library.scale(block, stream)


def program_two_lines():
    block, (first, second) = memory(), streams()
    library.scale(block, first)
    library.scale(block, second)


def program_one_line_two_calls():
    block, (first, second) = memory(), streams()
    library.scale(block, first), library.scale(block, second)


def program_comprehension():
    block = memory()
    [library.scale(block, stream) for stream in streams()]


def program_map_of_own_function():
    block = memory()
    list(map(lambda stream: library.scale(block, stream), streams()))


def program_map_of_library_function():
    block = memory()
    list(map(partial(library.scale, block), streams()))


def program_unpacked_map():
    block = memory()
    _, _ = map(partial(library.scale, block), streams())


def program_reduce_of_own_function():
    block = memory()
    reduce(lambda _, stream: library.scale(block, stream), streams(), None)


def program_while_loop():
    block, left = memory(), list(streams())
    while left:
        library.scale(block, left.pop())


def program_recursion(block=None, left=()):
    if block is None:
        program_recursion(memory(), streams())
    elif left:
        library.scale(block, left[0])
        program_recursion(block, left[1:])


def program_generator():
    block = memory()

    def steps():
        for stream in streams():
            library.scale(block, stream)
            yield

    list(steps())


def program_callback_in_library():
    block, (first, second) = memory(), streams()
    library.with_callback(block + SIZE, first, lambda: library.scale(block, first))
    library.with_callback(block + SIZE, first, lambda: library.scale(block, second))


def program_context_manager():
    block, (first, second) = memory(), streams()
    with library.scope(block, first):
        library.scale(block, second)


def program_missing_wait_for_library():
    block = memory()
    library.start(block)
    library.scale(block, gpu.stream())


def program_stream_made_by_library():
    block, first, second = memory(), library.make_stream(), library.make_stream()
    library.scale(block, first)
    library.scale(block, second)


def program_threads():
    block = memory()
    for stream in streams():
        thread = threading.Thread(target=lambda stream=stream: library.scale(block, stream))
        thread.start(), thread.join()


def program_threads_of_library_function():
    block = memory()
    for stream in streams():
        thread = threading.Thread(target=library.scale, args=(block, stream))
        thread.start(), thread.join()


if __name__ == "__main__":
    for name, run in list(globals().items()):
        if name.startswith(("library_", "program_")):
            run()
    gpu.sync()
    gpu.close()
