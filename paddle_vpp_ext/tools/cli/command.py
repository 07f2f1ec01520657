"""What all commands share."""

PROGRAM = "python -m paddle_vpp_ext"
STATUS = "exit status: 0 fine, 1 a problem, 2 wrong arguments"


class CommandError(Exception):
    """Ends a command: its text goes to stderr.

    ``status`` is the exit status: 2 if what was typed is wrong, 1 for other trouble.
    """

    def __init__(self, text: str, status: int = 2):
        super().__init__(text)
        self.status = status
