"""The command line: finds the command, loads only what that command needs, and turns errors into one paragraph."""

from __future__ import annotations

import importlib
import sys
import textwrap

from runflat import __version__
from runflat.errors import INTERRUPTED, RunflatError

COMMANDS = {
    "plan": "what each device holds, sends and needs, for a model and its dead slots",
    "verify": "prove on your model that a step with dead slots equals the unsharded step",
    "train": "train a causal LM; lose devices, go on at a lower degree, take them back",
    "controller": "train with workers that Slurm, Kubernetes or ssh start, on many machines",
    "worker": "drive one device of a job of runflat controller",
    "demo": "lose a worker in the middle of a step, train on, take it back, and compare",
    "devices": "list the devices of a run: who trains, waits, is lost, and why",
    "device": "ask one device of a run to drain, to be killed, or to return",
    "compare": "the same training under the same failures, once per strategy",
    "chaos": "strike a small training job at random, and count what it lost",
    "export": "write a run's weights as a model directory that transformers loads",
    "diff": "compare two checkpoints of any layouts, tensor by tensor",
    "top": "watch a running job in a terminal; drain and return devices",
    "report": "runs and results as one HTML page with figures",
    "simulate": "what each strategy is worth on a cluster and its failures",
    "sweep": "the same over a range of failure rates, domain sizes, spares, ...",
    "advise": "which strategy, how many spares, how much power headroom, and how sure that is",
    "trace": "describe a file of failures: rates, repair times, concurrency",
    "step-time": "predict the time of a training step, part by part",
    "power": "what power boost can do on this machine; measure how fast power makes a job",
    "power-agent": "the privileged process of a node that sets power limits and takes them back",
    "validate": "hold the step-time model against published measurements",
}
"""Commands by name, with the line that `runflat --help` prints; each is `main(argv)` of a module in `commands`."""


def usage() -> str:
    """Returns the text of `runflat --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: runflat COMMAND [flags]      (runflat COMMAND --help shows its flags and an example)",
            "",
            *lines,
            "",
            "example: runflat train examples/tiny.toml --run runs/first",
        ]
    )


def run(argv: list[str]) -> int:
    """Returns the exit code of the command line `argv` (without the program's name)."""
    if argv and argv[0] == "--version":
        print(f"runflat {__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"runflat: there is no command '{argv[0]}'; the commands are {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    module = importlib.import_module(f"runflat.commands.{argv[0].replace('-', '_')}")
    try:
        code: int = module.main(argv[1:])
    except RunflatError as error:
        print(textwrap.fill(f"runflat {argv[0]}: {error}", width=100, break_on_hyphens=False), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"runflat {argv[0]}: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): end quietly, and keep Python from flushing into the closed pipe.
        sys.stdout = None
        return 0
    except OSError as error:
        print(f"runflat {argv[0]}: a file cannot be read or written: {error}", file=sys.stderr)
        return 2
    return code


def main() -> None:
    """Entry point of the `runflat` script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
