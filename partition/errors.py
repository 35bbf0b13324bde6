"""The one exception type for errors that a user can cause and mend."""


class UserError(Exception):
    """A mistake in what the user gave: a spec, an option, a file.

    The message is one line that names the thing, its value and the mend. The launcher prints it
    without a traceback and exits with code 2.
    """
