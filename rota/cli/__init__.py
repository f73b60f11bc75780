"""The command line: one file per command, and no logic that a Python user would miss."""

from __future__ import annotations

import contextlib
import sys

import click

from rota import __version__
from rota.cli.devices import devices
from rota.cli.doctor import doctor
from rota.cli.explain import explain
from rota.cli.output import tell
from rota.cli.plan import plan
from rota.cli.report import report
from rota.cli.resume import resume
from rota.cli.run import run
from rota.cli.simulate import simulate
from rota.cli.status import status
from rota.cli.stop import stop
from rota.errors import CheckpointError, InputError, RotaError, RunInUseError, StoreError
from rota.refusals import advice, refusal, sentence
from rota.report.format import one_line
from rota.streams import cut_off, open_standard

EXIT_FAILED, EXIT_INPUT, EXIT_INTERRUPTED = 1, 2, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rota")
def commands() -> None:
    """Train many large PyTorch models on the devices you have."""


for command in (run, plan, simulate, explain, devices, status, resume, stop, report, doctor):
    commands.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """The `rota` command.

    Exit codes: 0 all finished, 1 some failed, 2 wrong input or a run folder that cannot be used, 130 interrupted.
    """
    open_standard()
    try:
        # Without its standalone mode click returns the code that a command exits with.
        code = commands.main(args=arguments, prog_name="rota", standalone_mode=False) or 0
    except click.ClickException as error:
        with contextlib.suppress(OSError):
            error.show()
        code = EXIT_INPUT
    except (click.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except RotaError as error:
        refused = refusal(error) if isinstance(error, CheckpointError) else None
        told = str(error)
        if refused is not None and advice(refused) not in told:
            told = f"{told}; {advice(refused)}"
        tell(one_line(f"rota: {told}"), err=True)
        code = (
            EXIT_INPUT
            if isinstance(error, InputError | StoreError | RunInUseError) or refused is not None
            else EXIT_FAILED
        )
    except BrokenPipeError:  # `rota status | head`
        code = EXIT_FAILED
    except Exception as error:
        refused = refusal(error)
        if refused is None:
            raise
        tell(one_line(f"rota: {sentence(refused)}, then run it again"), err=True)
        code = EXIT_INPUT
    cut_off(sys.stdout)
    cut_off(sys.stderr)
    sys.exit(code)
