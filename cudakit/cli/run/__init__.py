"""``cudakit run``: somebody's program as it is, and what its GPUs did."""

from __future__ import annotations

from typing import Any

import click

from cudakit.cli.failure import before_the_start


class Launcher(click.Command):
    """A command whose own errors on the command line end with 125: other codes are the program's."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the command line."""
        with before_the_start():
            return super().make_context(*args, **kwargs)


@click.command(cls=Launcher, context_settings={"allow_interspersed_args": False})
@click.option("--sanitize", is_flag=True, help="Find races between streams.")
@click.option("--memory", is_flag=True, help="Record who holds torch's memory, for cudakit memviz.")
@click.option("-m", "module", is_flag=True, help="What follows is a module, as for python -m.")
@click.option("-c", "code", is_flag=True, help="What follows is code, as for python -c.")
@click.option(
    "-o",
    "--output",
    "outputs",
    metavar="FILE",
    multiple=True,
    help="Write the races to FILE as well: .json, .html or .sarif. Repeatable.",
)
@click.option("-f", "--force", is_flag=True, help="Replace files that exist.")
@click.option(
    "-q", "--quiet", is_flag=True, help="Say nothing without races, and one line with them."
)
@click.option(
    "--show",
    type=click.Choice(["likely", "possible"]),
    default="likely",
    show_default=True,
    help="possible: also conflicts of kernels whose accesses are not known well.",
)
@click.option(
    "--suppress",
    metavar="PATTERN|@FILE",
    multiple=True,
    help="Leave out races of kernel:GLOB or site:FILE[:FUNCTION]; @FILE lists such patterns.",
)
@click.option(
    "--accesses",
    type=click.Choice(["exact", "arguments"]),
    help="How to know what kernels touch: exact, as they run, or arguments, from the pointers that they"
    " are given. By default exact, where the device and what is installed allow it.",
)
@click.option("--stop-on-first", is_flag=True, help="Stop the program at its first race.")
@click.option(
    "--host-threads",
    type=click.Choice(["joined", "strict"]),
    default="joined",
    show_default=True,
    help="strict: a wait of one thread of the host orders nothing for the others.",
)
@click.option(
    "--on-missing",
    type=click.Choice(["refuse", "run"]),
    default="refuse",
    show_default=True,
    help="Where CUDA cannot be watched: refuse to start, or run all the same and say so.",
)
@click.option(
    "--snapshot",
    metavar="FILE",
    default="cudakit-memory.pickle",
    show_default=True,
    help="Where --memory leaves its snapshot.",
)
@click.option(
    "--python", metavar="PYTHON", help="The interpreter to use; by default that of the environment."
)
@click.option(
    "--no-follow", is_flag=True, help="Leave the processes alone that the program starts."
)
@click.argument(
    "words",
    metavar="SCRIPT|-m MODULE|-c CODE|COMMAND [ARG]...",
    nargs=-1,
    required=True,
    type=click.Path(readable=False),
)
def run(*, module: bool, code: bool, words: tuple[str, ...], **options: Any) -> int:
    """Run a program, and find the races between its CUDA streams or what its memory goes to.

    The program is what python would run: a script, -m MODULE or -c CODE; anything else is a command.
    What follows it is its own. It sees what it would see without cudakit, and ends as it would. The
    report goes to standard error; standard output and input are the program's.

    The exit code is the program's. Where that is 0, races make it 1. It is 125 where cudakit
    fails before the program starts, 126 where the program cannot be executed, 127 where it is not there.

    \b
    cudakit run --sanitize train.py --epochs 1
    cudakit run --sanitize -o races.json -o races.html -m package.train
    cudakit run --sanitize --suppress 'kernel:nccl*' --stop-on-first train.py
    cudakit run --memory train.py && cudakit memviz cudakit-memory.pickle
    """
    from cudakit.cli.run.session import RunSpec, run_program

    with before_the_start():
        if module and code:
            raise click.UsageError("a program is a module (-m) or code (-c), not both")
        prefix = ("-m",) if module else ("-c",) if code else ()
        spec = RunSpec(words=(*prefix, *words), **options)
    return run_program(spec)
