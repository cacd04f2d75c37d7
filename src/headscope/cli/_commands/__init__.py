"""The commands of the command line, one file each; ``--help`` imports only click."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import click

from headscope import __version__
from headscope.cli._commands.bench import bench
from headscope.cli._commands.check import check
from headscope.cli._commands.doctor import doctor
from headscope.cli._commands.image import image
from headscope.cli._commands.report import report
from headscope.cli._commands.survey import survey
from headscope.cli._commands.text import text
from headscope.cli._commands.trace import trace
from headscope.cli._commands.watch import watch
from headscope.cli._shared.mistakes import Mistake

__all__ = ["commands"]


TARGET = "HEADSCOPE_CPU_TARGET:"  # the start of the message about a target that this CPU does not run


class Commands(click.Group):
    """The group of all commands."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Return the command that the first argument names.

        Raises:
            Mistake: no command has that name; the message names the nearest one.
        """
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            every = self.list_commands(ctx)
            near = get_close_matches(name, every, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(every)}"
            raise Mistake(f"{name}: unknown command; {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command.

        Raises:
            Mistake: HEADSCOPE_CPU_TARGET names a target that this CPU does not run.
        """
        try:
            return super().invoke(ctx)
        except ValueError as error:
            if not str(error).startswith(TARGET):
                raise
            raise Mistake(str(error)) from error


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def commands(context: click.Context) -> None:
    """See multi-head attention at work, step by step and head by head.

    \b
    Start here:
      headscope text "i love to code"    a small trained language model reads your text
      headscope image --sample 3         a small trained vision model looks at a digit
      headscope trace                    every step of one attention layer, with shapes
      headscope watch text --file a.py   exact statistics of every head, also of your own model
      headscope check hw.py:Attention    find the mistakes in your attention module
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _command in (text, image, trace, watch, survey, check, report, doctor, bench):
    commands.add_command(_command)
