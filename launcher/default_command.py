"""Makes `run` the command when none is named: `buddy-pipeline --spec S` is `... run --spec S`."""

from typing import Any

from typer.core import TyperGroup

_DEFAULT = "run"
_OWN_OPTIONS = frozenset({"-h", "--help"})


class DefaultCommandGroup(TyperGroup):
    """A group of commands whose options may be given without its name for one of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the default command in front of options that are not the group's own."""
        if args and args[0].startswith("-") and args[0] not in _OWN_OPTIONS:
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The commands, then the options of the default one."""
        super().format_help(ctx, formatter)
        default = self.commands[_DEFAULT]
        with default.make_context(_DEFAULT, [], parent=ctx, resilient_parsing=True) as inner:
            default.format_help(inner, formatter)
